/* Numbers to codes, bit for bit as codec.py defines it, and back. All arithmetic is exact but the rounding. */
#include "mx.h"

#include <string.h>

enum rule { FLOOR, EVEN, CEIL, MSE };

typedef struct {
    int emax, emin, mantissa, max_code, bits, integer;
} element;

static const element ELEMENTS[] = {{8, -6, 3, 0x7e, 8, 0}, {15, -14, 2, 0x7b, 8, 0}, {4, -2, 2, 0x1f, 6, 0},
                                   {2, 0, 3, 0x1f, 6, 0},  {2, 0, 1, 0x07, 4, 0},    {0, 0, 6, 0x7f, 8, 1}};

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONES
#endif

MX_INLINE double power_of_two(int64_t e) { /* -1022..1023 */
    double value;
    int64_t bits = (e + 1023) << 52;
    memcpy(&value, &bits, 8);
    return value;
}

MX_INLINE int shared_exponent(uint32_t amax, const element *f, int rule) {
    if (rule == EVEN) amax += 1u << (23 - f->mantissa - 1);
    if (rule == CEIL) amax += (1u << 23) - 1;
    int e = (int)(amax >> 23) - 127 - f->emax;
    return e < -127 ? -127 : e > 127 ? 127 : e;
}

/* Adding 1.5 * 2^23 rounds to the nearest whole number, ties to even, and leaves it in the low bits. */
#define ROUND(v) ((int32_t)(mx_bits((v) + 0x1.8p23f) & 0x3fffff))

/* w * 2^-e is exact, but where it is far below the smallest code. */
MX_INLINE void round_block(const float *w, int e, const element *f, uint16_t *code) {
    const float down = mx_scale((uint8_t)(127 - e));
    const int32_t emin = f->emin, mantissa = f->mantissa, top = f->max_code, sign_at = f->bits - 1, integer = f->integer;
    for (int i = 0; i < MX_BLOCK; i++) {
        uint32_t bits = mx_bits(w[i] * down), sign = bits >> 31;
        int32_t binade = (int32_t)(bits >> 23 & 0xff) - 127;
        binade = integer || binade < emin ? emin : binade;
        float steps_up = mx_from_bits((uint32_t)(mantissa - binade + 127) << 23);
        int32_t steps = ROUND(mx_from_bits(bits & 0x7fffffff) * steps_up) + ((binade - emin) << mantissa);
        steps = steps > top ? top : steps;
        int32_t negative = -(int32_t)sign;
        code[i] = (uint16_t)(integer ? ((steps ^ negative) - negative) & 0xff : steps | (int32_t)sign << sign_at);
    }
}

MX_INLINE double squared_error(const float *w, int e, const element *f, const float *values) {
    uint16_t code[MX_BLOCK];
    double error = 0, scale = power_of_two(e);
    round_block(w, e, f, code);
    for (int i = 0; i < MX_BLOCK; i++) {
        double d = values[code[i]] * scale - w[i];
        error += d * d;
    }
    return error;
}

/* One row: its codes as 16-bit words, its scales. Returns how many of its blocks hold a number that is not finite. */
CLONES static int quantize_row(const float *w, int64_t k, const element *f, int rule, const float *values, uint16_t *code,
                               uint8_t *scales) {
    int bad = 0;
    for (int64_t b = 0; b < k / MX_BLOCK; b++, w += MX_BLOCK, code += MX_BLOCK) {
        uint32_t amax = 0;
        for (int i = 0; i < MX_BLOCK; i++) {
            uint32_t bits = mx_bits(w[i]) & 0x7fffffff;
            amax = bits > amax ? bits : amax;
        }
        bad += amax >= 0x7f800000;
        int e = shared_exponent(amax, f, rule == MSE ? FLOOR : rule);
        if (rule == MSE) {
            const int floor_e = e, steps[2] = {1, -1};
            double least = squared_error(w, e, f, values);
            for (int i = 0; i < 2; i++) {
                int other = floor_e + steps[i] < -127 ? -127 : floor_e + steps[i] > 127 ? 127 : floor_e + steps[i];
                double error = squared_error(w, other, f, values);
                if (error < least) least = error, e = other;
            }
        }
        scales[b] = (uint8_t)(e + 127);
        round_block(w, e, f, code);
    }
    return bad;
}

void mx_pack_row(uint8_t *p, const uint16_t *code, int64_t k, int bits);

/* codes [n, k * bits / 8] and scales [n, k / 32] of w [n, k]. `scratch` has 6 * k bytes a thread. Returns the first row that
 * holds a NaN or an infinity, or -1. */
int64_t mx_quantize(const void *w, int dtype, int64_t n, int64_t k, int format, int rule, const float *values, uint8_t *codes,
                    uint8_t *scales, uint8_t *scratch, int threads) {
    const element *f = &ELEMENTS[format];
    const int64_t row_bytes = k * f->bits / 8, chunk = (n + threads - 1) / threads;
    int64_t first_bad = n;
#pragma omp parallel for num_threads(threads) schedule(static, 1) reduction(min : first_bad)
    for (int t = 0; t < threads; t++) {
        float *wide = (float *)(scratch + (size_t)t * 6 * k);
        uint16_t *code = (uint16_t *)(wide + k);
        for (int64_t r = t * chunk; r < n && r < (t + 1) * chunk; r++) {
            const uint16_t *half = (const uint16_t *)w + r * k;
            if (dtype == MX_DT_F32) memcpy(wide, (const float *)w + r * k, (size_t)k * 4);
            else if (dtype == MX_DT_BF16)
                for (int64_t i = 0; i < k; i++) wide[i] = mx_from_bits((uint32_t)half[i] << 16);
            else
                for (int64_t i = 0; i < k; i++) wide[i] = mx_from_f16(half[i]);
            if (quantize_row(wide, k, f, rule, values, code, scales + r * (k / MX_BLOCK)) && r < first_bad) first_bad = r;
            mx_pack_row(codes + r * row_bytes, code, k, f->bits);
        }
    }
    return first_bad < n ? first_bad : -1;
}

void mx_tile_values(const uint8_t *tile, const float *values, int bits, float w[MX_BLOCK][MX_ROWS]);

/* Rows of `groups` row groups, from `group` on, as numbers of `dtype`: out [rows, k], rows past n left out. */
void mx_dequantize(const mx_layer *l, int64_t group, int64_t groups, void *out, int dtype, int threads) {
    const int64_t blocks = l->k / MX_BLOCK, bytes = mx_tile_bytes(l->bits);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t g = 0; g < groups; g++) {
        const uint8_t *codes = mx_group_codes(l, group + g), *scales = mx_group_scales(l, group + g);
        const int64_t left = l->n - (group + g) * MX_ROWS, rows = left < MX_ROWS ? left : MX_ROWS;
        for (int64_t b = 0; b < blocks; b++) {
            float w[MX_BLOCK][MX_ROWS];
            mx_tile_values(codes + b * bytes, l->values, l->bits, w);
            for (int64_t r = 0; r < rows; r++) {
                const float scale = l->bits >= 16 ? 1.0f : mx_scale(scales[b * MX_ROWS + r]);
                const int64_t at = (g * MX_ROWS + r) * l->k + b * MX_BLOCK;
                for (int i = 0; i < MX_BLOCK; i++) {
                    const float value = w[i][r] * scale;
                    if (dtype == MX_DT_F32) ((float *)out)[at + i] = value;
                    else ((uint16_t *)out)[at + i] = dtype == MX_DT_BF16 ? mx_to_bf16(value) : mx_to_f16(value);
                }
            }
        }
    }
}
