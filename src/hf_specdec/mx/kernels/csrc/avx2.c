/* float32 activations on AVX2, FMA and F16C. Codes are moved to the places of a float16 (its subnormals make theirs exact),
 * widened, and multiplied as adjacent pairs of inputs; the two sums of a pair are added at the end of a row group. */
#if defined(__x86_64__)
#include <immintrin.h>

#include "mx.h"

#define TARGET_AVX2 "avx2,fma,f16c"
#define WORDS(p, i) _mm256_loadu_si256((const __m256i *)(const void *)((p) + 64 * (i)))

/* Eight vectors of 16 words (8 rows): p points at their half of the first vector's 64 bytes. Codes keep what is above them. */
MX_INLINE __attribute__((target(TARGET_AVX2))) void split_codes(const uint8_t *p, __m256i w[8], const int bits) {
    if (bits == 4) {
        for (int j = 0; j < 8; j++) w[j] = _mm256_srli_epi16(WORDS(p, j / 4), j % 4 * 4);
    } else if (bits == 6) {
        __m256i a = WORDS(p, 0), b = WORDS(p, 1), c = WORDS(p, 2), high = _mm256_set1_epi16(0x30);
        w[0] = a, w[1] = _mm256_srli_epi16(a, 6), w[3] = b, w[4] = _mm256_srli_epi16(b, 6);
        w[5] = c, w[6] = _mm256_srli_epi16(c, 6);
        w[2] = _mm256_or_si256(_mm256_srli_epi16(a, 12), _mm256_and_si256(_mm256_srli_epi16(c, 8), high));
        w[7] = _mm256_or_si256(_mm256_srli_epi16(b, 12), _mm256_and_si256(_mm256_srli_epi16(c, 10), high));
    } else if (bits == 8) {
        for (int j = 0; j < 8; j++) w[j] = j % 2 ? _mm256_srli_epi16(WORDS(p, j / 2), 8) : WORDS(p, j / 2);
    } else {
        for (int j = 0; j < 8; j++) w[j] = WORDS(p, j);
    }
}

/* Words to float32 times 2^-exponent(format): low and high half of the vector. */
MX_INLINE __attribute__((target(TARGET_AVX2))) void widen(__m256i w, __m256 f[2], const int format) {
    if (format == MX_INT8 || format == MX_BF16) {
        __m128i half[2] = {_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1)};
        for (int i = 0; i < 2; i++) {
            if (format == MX_BF16) {
                f[i] = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half[i]), 16));
            } else {
                __m128i word = _mm_srai_epi16(_mm_slli_epi16(half[i], 8), 8);
                f[i] = _mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(word));
            }
        }
        return;
    }
    const int bits = format == MX_E2M1 ? 4 : format == MX_E2M3 || format == MX_E3M2 ? 6 : 8;
    const int up = format == MX_E2M1 ? 9 : format == MX_E5M2 || format == MX_E3M2 ? 8 : 7;
    __m256i magnitude = _mm256_and_si256(_mm256_slli_epi16(w, up), _mm256_set1_epi16((short)(((1 << (bits - 1)) - 1) << up)));
    __m256i sign = _mm256_and_si256(_mm256_slli_epi16(w, 16 - bits), _mm256_set1_epi16((short)0x8000));
    __m256i half = _mm256_or_si256(magnitude, sign);
    f[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(half));
    f[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1));
}

/* What `widen` leaves out: a power of two that makes up for the difference of the two exponent biases. */
MX_INLINE float missing_factor(int format) {
    switch (format) {
        case MX_E4M3: return 0x1p8f;
        case MX_E3M2: return 0x1p12f;
        case MX_E2M3: case MX_E2M1: return 0x1p14f;
        case MX_INT8: return 0x1p-6f;
        default: return 1.0f;
    }
}

/* Totals of one row group: [row][16 rows x 2 parities] in pairs. */
MX_INLINE __attribute__((target(TARGET_AVX2))) void multiply(const mx_job *job, int64_t group, int64_t m0, const int rows,
                                                            const int format, const int bits) {
    const mx_layer *l = job->layer;
    const int64_t k = l->k, blocks = k / MX_BLOCK;
    const int half_bytes = 32 * bits;
    const __m256 factor = _mm256_set1_ps(missing_factor(format));
    float pairs[2][2 * MX_ROWS];
    for (int side = 0; side < 2; side++) { /* rows 0..7, then 8..15 */
        const uint8_t *codes = mx_group_codes(l, group) + 32 * side, *scales = mx_group_scales(l, group) + 8 * side;
        const float *x = (const float *)job->x + m0 * k;
        __m256 total[2][2];
        for (int m = 0; m < rows; m++) total[m][0] = total[m][1] = _mm256_setzero_ps();
        for (int64_t b = 0; b < blocks; b++, codes += 2 * half_bytes, x += MX_BLOCK) {
            __m256 sum[2][2];
            for (int m = 0; m < rows; m++) sum[m][0] = sum[m][1] = _mm256_setzero_ps();
            for (int half = 0; half < 2; half++) {
                __m256i w[8];
                split_codes(codes + half * half_bytes, w, bits);
#pragma GCC unroll 8
                for (int v = 0; v < 8; v++) {
                    __m256 f[2];
                    widen(w[v], f, format);
#pragma GCC unroll 2
                    for (int m = 0; m < rows; m++) {
                        double pair;
                        __builtin_memcpy(&pair, x + m * k + 16 * half + 2 * v, 8);
                        __m256 both = _mm256_castpd_ps(_mm256_set1_pd(pair));
                        sum[m][0] = _mm256_fmadd_ps(f[0], both, sum[m][0]);
                        sum[m][1] = _mm256_fmadd_ps(f[1], both, sum[m][1]);
                    }
                }
            }
            __m256 scale[2] = {_mm256_set1_ps(1.0f), _mm256_set1_ps(1.0f)};
            if (format != MX_BF16) {
                __m256i e = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)(scales + b * MX_ROWS)));
                __m256 s = _mm256_castsi256_ps(_mm256_max_epu32(_mm256_slli_epi32(e, 23), _mm256_set1_epi32(1 << 22)));
                scale[0] = _mm256_permutevar8x32_ps(s, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3));
                scale[1] = _mm256_permutevar8x32_ps(s, _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7));
            }
            for (int m = 0; m < rows; m++)
                for (int i = 0; i < 2; i++)
                    total[m][i] = _mm256_fmadd_ps(_mm256_mul_ps(sum[m][i], factor), scale[i], total[m][i]);
        }
        for (int m = 0; m < rows; m++)
            for (int i = 0; i < 2; i++) _mm256_storeu_ps(pairs[m] + 16 * side + 8 * i, total[m][i]);
    }
    int64_t left = l->n - group * MX_ROWS;
    for (int m = 0; m < rows; m++) {
        float values[MX_ROWS];
        for (int r = 0; r < MX_ROWS; r++) values[r] = pairs[m][2 * r] + pairs[m][2 * r + 1];
        mx_store(job, m0 + m, group * MX_ROWS, values, left < MX_ROWS ? left : MX_ROWS);
    }
}

#define FORMAT(F, BITS)                                                                                              \
    case F:                                                                                                          \
        for (int64_t group = first; group < last; group++) {                                                         \
            int64_t m = 0;                                                                                           \
            for (; m + 2 <= job->m; m += 2) multiply(job, group, m, 2, F, BITS);                                     \
            if (m < job->m) multiply(job, group, m, 1, F, BITS);                                                     \
        }                                                                                                            \
        break;

__attribute__((target(TARGET_AVX2))) void mx_run_avx2(const mx_job *job, int64_t first, int64_t last) {
    switch (job->layer->format) {
        FORMAT(MX_E4M3, 8) FORMAT(MX_E5M2, 8) FORMAT(MX_E3M2, 6) FORMAT(MX_E2M3, 6) FORMAT(MX_E2M1, 4) FORMAT(MX_INT8, 8)
        FORMAT(MX_BF16, 16)
    }
}
#endif
