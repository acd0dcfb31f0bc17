/* float32 activations (16-bit ones are widened first), by instructions without a dot product of 16-bit numbers. A code goes to the places of a
 * float16 (whose subnormals make its own exact) and is widened; two inputs that lie side by side are multiplied as a pair, and the two sums of a
 * pair are added at the end of a row group. One or two rows of x take the weights from registers, more from the first-level cache, where a block
 * is decoded once for all of them. Included once per set of instructions, with
 *   TARGET, RUN, LANES  the target attribute of every function, the one that is not static, numbers of a vector
 *   BOTH(x)             a pair of x in all places
 *   MULADD(a, b, c)     a * b + c, fused
 *   FROM_HALVES(w, to)  float16 numbers to float32, in two vectors
 *   ON_TOP(w, to)       words as the upper halves of 32 bits over zeros, in two vectors
 *   ROWS(scales, s, on_top)  the scales of 16 rows, each one twice, in PARTS vectors, as FROM_HALVES has the rows, or ON_TOP; byte 0 is 2^-127
 *   PLACE(r, on_top)    where row r of a pair lies after the one or the other
 */
#include "mx.h"

#define PARTS (2 * MX_ROWS / LANES) /* vectors of a pair of inputs: 16 rows, two numbers each */
#define PAIRS (MX_BLOCK / 2)
#define AT_ONCE 2   /* rows of x that share a load of weights: enough sums at once that no product waits for the one before */
#define MOST 64     /* rows of x that share a decoded block */
#define AHEAD 2048  /* bytes of codes that are asked for in advance */

typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef int32_t whole __attribute__((vector_size(4 * LANES)));
typedef uint16_t words __attribute__((vector_size(4 * LANES)));
typedef int16_t signed_words __attribute__((vector_size(4 * LANES)));
typedef words words_anywhere __attribute__((aligned(2), may_alias));
typedef struct {
    lanes part[PARTS];
} vectors;

#define IS_ON_TOP(format) ((format) == MX_INT8 || (format) == MX_BF16)

/* Words of vector v of the eight of half a tile (see pack_half in tiles.c), which begin with their code, whatever follows. */
MX_INLINE TARGET words code_first(const uint8_t *half, const int v, const int bits) {
#define WORDS(i) (*(const words_anywhere *)(const void *)(half + 64 * (i)))
    if (bits == 4) return WORDS(v / 4) << (12 - v % 4 * 4);
    if (bits == 8) return v % 2 ? WORDS(v / 2) : WORDS(v / 2) << 8;
    if (bits == 16) return WORDS(v);
    if (v == 2) return WORDS(0) >> 2 | (WORDS(2) << 2 & 0xc000);
    if (v == 7) return WORDS(1) >> 2 | (WORDS(2) & 0xc000);
    return WORDS(v / 3 + (v == 5)) << (v == 1 || v == 4 || v == 6 ? 4 : 10);
}

/* What `widen` leaves out: a power of two that makes up for the difference of the two exponent biases. */
MX_INLINE float missing_factor(const int format) {
    switch (format) {
        case MX_E4M3: return 0x1p8f;
        case MX_E3M2: return 0x1p12f;
        case MX_E2M3: case MX_E2M1: return 0x1p14f;
        case MX_INT8: return 0x1p-30f;
        default: return 1.0f;
    }
}

/* The words' numbers over `missing_factor`. */
MX_INLINE TARGET void widen(words w, lanes f[2], const int format) {
    if (IS_ON_TOP(format)) {
        if (format == MX_INT8) w &= 0xff00;
        ON_TOP(w, f);
        for (int i = 0; i < 2 && format == MX_INT8; i++) f[i] = __builtin_convertvector((whole)f[i], lanes);
        return;
    }
    const int down = format == MX_E5M2 ? 0 : format == MX_E4M3 ? 1 : format == MX_E3M2 ? 2 : 3;
    const int bits = format == MX_E2M1 ? 4 : format == MX_E2M3 || format == MX_E3M2 ? 6 : 8;
    const int mask = 0x8000 | (((1 << (bits - 1)) - 1) << (16 - bits - down));
    w = (words)((signed_words)w >> down) & (uint16_t)mask;
    FROM_HALVES(w, f);
}

MX_INLINE TARGET vectors decode(const uint8_t *codes, const int pair, const int format, const int bits) {
    vectors w;
    for (int i = 0; i < PARTS; i += 2) widen(code_first(codes + pair / 8 * 32 * bits + 2 * LANES * i, pair % 8, bits), w.part + i, format);
    return w;
}

/* The scales of a block's 16 rows, as `decode` has the rows. */
MX_INLINE TARGET vectors load_scales(const uint8_t *scales, const int format) {
    vectors s;
    ROWS(scales, s.part, IS_ON_TOP(format));
    return s;
}

/* total[row] += a block times its 32 inputs of `rows` rows of x. The weights come from `tile`, or, without one, from the codes. One row's result
 * is made by the same operations in the same order whatever the number of rows. */
MX_INLINE TARGET void multiply(const vectors *tile, const uint8_t *codes, const uint8_t *scales, const float *x, vectors *total, const int rows,
                               const int format, const int bits) {
    vectors sum[AT_ONCE];
#pragma GCC unroll 2
    for (int m = 0; m < rows; m++)
        for (int i = 0; i < PARTS; i++) sum[m].part[i] = (lanes){0};
#define PAIR(W)                                                                                                           \
    const vectors w = W;                                                                                                  \
    _Pragma("GCC unroll 2") for (int m = 0; m < rows; m++) {                                                              \
        const lanes both = BOTH(x + m * MX_BLOCK + 2 * pair);                                                             \
        for (int i = 0; i < PARTS; i++) sum[m].part[i] = MULADD(w.part[i], both, sum[m].part[i]);                         \
    }
    if (tile) {
#pragma GCC unroll 2
        for (int pair = 0; pair < PAIRS; pair++) { PAIR(tile[pair]) }
    } else {
#pragma GCC unroll 16
        for (int pair = 0; pair < PAIRS; pair++) { PAIR(decode(codes, pair, format, bits)) }
    }
    const vectors scale = format == MX_BF16 ? (vectors){0} : load_scales(scales, format);
#pragma GCC unroll 2
    for (int m = 0; m < rows; m++)
        for (int i = 0; i < PARTS; i++)
            total[m].part[i] = format == MX_BF16 ? total[m].part[i] + sum[m].part[i]
                                                 : MULADD(sum[m].part[i] * missing_factor(format), scale.part[i], total[m].part[i]);
}

/* The two sums of every pair, and the rows in their order. */
MX_INLINE TARGET void store(const mx_job *job, int64_t group, int64_t m, const vectors *total, const int format) {
    const int64_t left = job->layer->n - group * MX_ROWS;
    float pairs[2 * MX_ROWS], values[MX_ROWS];
    __builtin_memcpy(pairs, total, sizeof pairs);
    for (int r = 0; r < MX_ROWS; r++) values[r] = pairs[PLACE(r, IS_ON_TOP(format))] + pairs[PLACE(r, IS_ON_TOP(format)) + 1];
    mx_store(job, m, group * MX_ROWS, values, left < MX_ROWS ? left : MX_ROWS);
}

MX_INLINE TARGET void ask_ahead(const uint8_t *codes, const int bits) {
    for (int line = 0; line < 64 * bits; line += 64) __builtin_prefetch(codes + line + AHEAD);
}

/* A row group times one or two rows of x. */
MX_INLINE TARGET void few_rows(const mx_job *job, int64_t group, int64_t m0, const int rows, const int format, const int bits) {
    const mx_layer *l = job->layer;
    const uint8_t *codes = mx_group_codes(l, group), *scales = mx_group_scales(l, group);
    const float *x = (const float *)job->x + m0 * MX_BLOCK;
    vectors total[AT_ONCE] = {0};
    for (int64_t b = 0; b < l->k / MX_BLOCK; b++, codes += 64 * bits, scales += MX_ROWS, x += job->x_block) {
        ask_ahead(codes, bits);
        multiply(NULL, codes, scales, x, total, rows, format, bits);
    }
    for (int m = 0; m < rows; m++) store(job, group, m0 + m, total + m, format);
}

/* A row group times at most MOST rows of x. */
MX_INLINE TARGET void many_rows(const mx_job *job, int64_t group, int64_t m0, int64_t rows, const int format, const int bits) {
    const mx_layer *l = job->layer;
    const uint8_t *codes = mx_group_codes(l, group), *scales = mx_group_scales(l, group);
    const float *x = (const float *)job->x + m0 * MX_BLOCK;
    vectors total[MOST], tile[PAIRS];
    for (int64_t m = 0; m < rows; m++) total[m] = (vectors){0};
    for (int64_t b = 0; b < l->k / MX_BLOCK; b++, codes += 64 * bits, scales += MX_ROWS, x += job->x_block) {
        ask_ahead(codes, bits);
#pragma GCC unroll 16
        for (int pair = 0; pair < PAIRS; pair++) tile[pair] = decode(codes, pair, format, bits);
        int64_t m = 0;
        for (; m + AT_ONCE <= rows; m += AT_ONCE) multiply(tile, codes, scales, x + m * MX_BLOCK, total + m, AT_ONCE, format, bits);
        if (m < rows) multiply(tile, codes, scales, x + m * MX_BLOCK, total + m, 1, format, bits);
    }
    for (int64_t m = 0; m < rows; m++) store(job, group, m0 + m, total + m, format);
}

MX_INLINE TARGET void run(const mx_job *job, int64_t first, int64_t last, const int format, const int bits) {
    for (int64_t group = first; group < last; group++)
        for (int64_t m0 = 0; m0 < job->m; m0 += MOST) {
            const int64_t rows = job->m - m0 < MOST ? job->m - m0 : MOST;
            if (rows == 1) few_rows(job, group, m0, 1, format, bits);
            else if (rows == AT_ONCE) few_rows(job, group, m0, AT_ONCE, format, bits);
            else many_rows(job, group, m0, rows, format, bits);
        }
}

#define FORMAT(F, BITS) case F: run(job, first, last, F, BITS); break;

TARGET void RUN(const mx_job *job, int64_t first, int64_t last) {
    switch (job->layer->format) {
        FORMAT(MX_E4M3, 8) FORMAT(MX_E5M2, 8) FORMAT(MX_E3M2, 6) FORMAT(MX_E2M3, 6) FORMAT(MX_E2M1, 4) FORMAT(MX_INT8, 8)
        FORMAT(MX_BF16, 16)
    }
}
