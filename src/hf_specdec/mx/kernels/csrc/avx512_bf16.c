/* bfloat16 activations by the dot products of AVX-512 BF16, with VBMI and VBMI2. */
#include "mx.h"

#if defined(__x86_64__)
#include "avx512.h"

#define TARGET __attribute__((target("avx2")))
#include "turn.h"

/* Rows of x, [m, k] bfloat16, in chunks of eight (the last one may be shorter): in a chunk, the pair of inputs 2j and 2j + 1 of its
 * first row, of its second row, and so on, then the next pair: what the products read one after another. This packs one chunk. */
TARGET void mx_pack_pairs(const uint32_t *x, uint32_t *packed, int64_t chunk, int64_t m, int64_t k) {
    const int64_t m0 = 8 * chunk, rows = m - m0 < 8 ? m - m0 : 8, pairs = k / 2;
    x += m0 * pairs, packed += m0 * pairs;
    for (int64_t j = 0; rows == 8 && j < pairs; j += 8) { /* k is a multiple of 32 */
        v8u word[8];
#pragma GCC unroll 8
        for (int r = 0; r < 8; r++) word[r] = *(const v8u *)(x + r * pairs + j);
        turn(word);
#pragma GCC unroll 8
        for (int r = 0; r < 8; r++) *(v8u *)(packed + (j + r) * 8) = word[r];
    }
    for (int64_t j = 0; rows < 8 && j < pairs; j++)
        for (int64_t r = 0; r < rows; r++) packed[j * rows + r] = x[r * pairs + j];
}

#define TARGET512 "avx512f,avx512bw,avx512vl,avx512bf16,avx512vbmi,avx512vbmi2"
#define RUN mx_run_avx512_bf16
#define TABLE(job, bits) ((bits) == 8 ? mx_load_byte_table(job) : mx_load_table(job))
#define SPLIT2 SPLIT2_VBMI2
#define SPLIT7 SPLIT7_VBMI2
#define BYTES BYTES_VBMI
#define TO_BF16 BF16_WORDS

typedef int32_t pair;
typedef __m512i weights;
#define PREPARE(w) (w)
#define IN_PLACE 1
#define WIDE 32
#define PANEL 8
#define HALVES _Pragma("GCC unroll 2")
#define PANEL_UNROLL _Pragma("GCC unroll 16")

MX_INLINE __attribute__((target(TARGET512))) void add_products(__m512 *sum, const weights *w, const pair *x, const int groups) {
    const __m512i both = _mm512_set1_epi32(*x);
#pragma GCC unroll 4
    for (int g = 0; g < groups; g++) sum[g] = _mm512_dpbf16_ps(sum[g], (__m512bh)w[g], (__m512bh)both);
}

/* Memory is read faster from few places than from many; short weights, and those of 16 bits that many rows share, from one. */
#define SHORT 1024 /* inputs up to which two streams of weights are read more slowly than one */
MX_INLINE int side_by_side(int64_t m, int64_t k, int64_t left, const int bits) {
    if (left >= 4 && (bits == 16 ? m == 1 : bits == 4 && (m == 3 || m == 4))) return 4;
    if (left < 2 || (bits == 16 ? m <= WIDE && m > (k <= SHORT ? 2 : 8) : m == 1 && k <= SHORT)) return 1;
    return 2;
}
#define ALONE 1
#define FOURS(AT) AT(4, 1, 0) AT(4, 3, 0) AT(4, 4, 0)

#include "rows512.h"
#endif
