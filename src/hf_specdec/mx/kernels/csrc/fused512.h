/* float32 activations (16-bit ones are widened first) on AVX-512, by two fused multiply-adds where avx512_bf16.c has one dot product: for rows512.h, behind
 * TARGET512. */
typedef struct {
    float first, second;
} pair;
typedef mx_pairs weights;
#define PREPARE MX_PAIRS
#define IN_PLACE 0
#define WIDE 8
#define PANEL 4
#define HALVES _Pragma("GCC unroll 1") /* or there is much code for little */
#define PANEL_UNROLL _Pragma("GCC unroll 4")

MX_INLINE __attribute__((target(TARGET512))) void add_products(__m512 *sum, const weights *w, const pair *x, const int groups) {
    const __m512 first = _mm512_set1_ps(x->first), second = _mm512_set1_ps(x->second);
#pragma GCC unroll 4
    for (int g = 0; g < groups; g++) sum[g] = _mm512_fmadd_ps(w[g].second, second, sum[g]);
#pragma GCC unroll 4
    for (int g = 0; g < groups; g++) sum[g] = _mm512_fmadd_ps(w[g].first, first, sum[g]);
}

MX_INLINE int side_by_side(int64_t m, int64_t k, int64_t left, const int bits) {
    (void)k, (void)bits;
    return left < 2 ? 1 : m <= 4 && left >= 4 ? 4 : 2;
}
#define ALONE 0
#define FOURS(AT) AT(4, 1, 0) AT(4, 2, 0) AT(4, 3, 0) AT(4, 4, 0)

#include "rows512.h"
