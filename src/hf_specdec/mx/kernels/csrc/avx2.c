/* float32 activations on AVX2, FMA and F16C. */
#if defined(__x86_64__)
#include <immintrin.h>

#define TARGET __attribute__((target("avx2,fma,f16c")))
#define RUN mx_run_avx2
#define LANES 8
#define BOTH(x) ((lanes)_mm256_castpd_ps(_mm256_broadcast_sd((const double *)(const void *)(x))))
#define MULADD(a, b, c) ((lanes)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c)))
#define FROM_HALVES(w, to)                                                    \
    to[0] = (lanes)_mm256_cvtph_ps(_mm256_castsi256_si128((__m256i)(w)));     \
    to[1] = (lanes)_mm256_cvtph_ps(_mm256_extracti128_si256((__m256i)(w), 1))
#define ON_TOP(w, to) /* within halves of a vector: rows 0, 1, 4, 5 and 2, 3, 6, 7 */                 \
    to[0] = (lanes)_mm256_unpacklo_epi16(_mm256_setzero_si256(), (__m256i)(w)),                       \
    to[1] = (lanes)_mm256_unpackhi_epi16(_mm256_setzero_si256(), (__m256i)(w))
#define ROWS(scales, s, on_top)                                                                                            \
    for (int i = 0; i < PARTS; i++) {                                                                                      \
        const __m256i e = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)((scales) + i / 2 * 8)));    \
        const int a = i % 2 ? on_top ? 2 : 4 : 0, b = on_top ? a + 4 : a + 2;                                              \
        const __m256i scale = _mm256_max_epu32(_mm256_slli_epi32(e, 23), _mm256_set1_epi32(1 << 22));                      \
        s[i] = (lanes)_mm256_permutevar8x32_epi32(scale, _mm256_setr_epi32(a, a, a + 1, a + 1, b, b, b + 1, b + 1));       \
    }
#define PLACE(r, on_top) ((on_top) ? (r) / 8 * 16 + (r) / 2 % 2 * 8 + (r) / 4 % 2 * 4 + (r) % 2 * 2 : 2 * (r))
#include "pairs.h"
#endif
