/* bfloat16 activations on AVX-512 BF16, VBMI and VBMI2. One row's result is made by the same instructions in the same order
 * whatever the number of rows: per block of 32, sixteen dot products into a fresh sum, then sum * scale into the total. */
#include "mx.h"

#if defined(__x86_64__)
#include <stdlib.h>

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

#define TARGET_BF16 "avx512f,avx512bw,avx512vl,avx512bf16,avx512vbmi,avx512vbmi2"
STORE_ROW(TARGET_BF16, BF16_WORDS)
#define BF16 __attribute__((target(TARGET_BF16)))
#define SHORT 1024 /* inputs up to which two streams of weights are read more slowly than one */

DECODE_TWO(decode_two, TARGET_BF16, SPLIT2_VBMI2, SPLIT7_VBMI2, BYTES_VBMI)

/* A block's sum, into the total: dense weights have no scale. */
#define ADD_BLOCK(total, sum, scale, bits) ((bits) == 16 ? _mm512_add_ps(total, sum) : _mm512_fmadd_ps(sum, scale, total))

/* Row groups group .. group + groups - 1 times rows m0 .. m0 + rows - 1 of x. Every group and row is a chain of dependent sums: with too
 * few of them at once the dot-product unit waits, so that up to eight rows take two groups or more. */
MX_INLINE BF16 void multiply(const mx_job *job, int64_t group, int64_t m0, const int groups, const int rows, const int bits,
                             const int integer, const int several) {
    const mx_layer *l = job->layer;
    const int64_t k = l->k, blocks = k / MX_BLOCK;
    const int half_bytes = 32 * bits;
    const mx_table table = bits == 8 ? mx_load_byte_table(job) : mx_load_table(job);
    const int32_t *x = (const int32_t *)job->x + m0 * k / 2; /* pairs, packed as in mx_pack_pairs */
    const int64_t share = several ? blocks * 2 * half_bytes / ((job->m + 7) / 8) : 0; /* of the next group: what these rows' turn asks for */
    const uint8_t *codes[4], *scales[4];
    for (int g = 0; g < groups; g++) codes[g] = mx_group_codes(l, group + g), scales[g] = mx_group_scales(l, group + g);
    __m512 total[4][8];
    for (int g = 0; g < groups; g++)
        for (int m = 0; m < rows; m++) total[g][m] = _mm512_setzero_ps();
    for (int64_t b = 0; b < blocks; b++, x += rows * MX_BLOCK / 2) {
        __m512 sum[4][8];
        for (int g = 0; g < groups; g++)
            for (int m = 0; m < rows; m++) sum[g][m] = _mm512_setzero_ps();
        if (bits < 16) ask_ahead(codes, groups, b, blocks, 2 * half_bytes);
#pragma GCC unroll 8
        for (int two = 0; two < 8; two++) {
            __m512i w[4][2];
#pragma GCC unroll 4
            for (int g = 0; g < groups; g++) {
                const uint8_t *at = codes[g] + (2 * b + two / 4) * half_bytes;
                decode_two(at, &table, w[g], two % 4, bits, integer);
                if (bits == 16 && !several)
                    for (int line = 0; line < 128; line += 64) _mm_prefetch((const char *)at + two % 4 * 128 + line + AHEAD, _MM_HINT_T0);
            }
#pragma GCC unroll 2
            for (int i = 0; i < 2; i++)
#pragma GCC unroll 8
                for (int m = 0; m < rows; m++) {
                    const __m512i pair = _mm512_set1_epi32(x[(2 * two + i) * rows + m]);
#pragma GCC unroll 4
                    for (int g = 0; g < groups; g++) sum[g][m] = _mm512_dpbf16_ps(sum[g][m], (__m512bh)w[g][i], (__m512bh)pair);
                }
        }
        if (several) {
            const uint8_t *next = codes[0] + blocks * 2 * half_bytes + m0 / 8 * share;
            ask(next + b * share / blocks, next + (b + 1) * share / blocks);
        }
        for (int g = 0; g < groups; g++) {
            const __m512 scale = bits == 16 ? _mm512_setzero_ps() : mx_load_scales(scales[g] + b * MX_ROWS);
            for (int m = 0; m < rows; m++) total[g][m] = ADD_BLOCK(total[g][m], sum[g][m], scale, bits);
        }
    }
    for (int g = 0; g < groups; g++)
        for (int m = 0; m < rows; m++) store_row(job, m0 + m, group + g, total[g][m]);
}

/* Many rows of x: stretches of PANEL blocks of one or two groups are decoded once, into the first-level cache, and multiplied by all rows.
 * The order of the sums is that of `multiply`. */
#define PANEL 8
#define WIDE 32 /* rows above which decoding once pays for writing the result down */

MX_INLINE BF16 void panel_rows(const uint8_t *w, const int64_t apart, const __m512 *scale, const int32_t *x, float *totals, int64_t blocks,
                               const int groups, const int rows, const int bits) {
    __m512 total[2][8];
    for (int g = 0; g < groups; g++)
        for (int m = 0; m < rows; m++) total[g][m] = _mm512_loadu_ps(totals + (m * groups + g) * MX_ROWS);
    for (int64_t b = 0; b < blocks; b++, w += 1024, x += rows * 16) {
        __m512 sum[2][8];
        for (int g = 0; g < groups; g++)
            for (int m = 0; m < rows; m++) sum[g][m] = _mm512_setzero_ps();
#pragma GCC unroll 16
        for (int v = 0; v < 16; v++)
#pragma GCC unroll 8
            for (int m = 0; m < rows; m++) {
                const __m512i pair = _mm512_set1_epi32(x[v * rows + m]);
#pragma GCC unroll 2
                for (int g = 0; g < groups; g++) sum[g][m] = _mm512_dpbf16_ps(sum[g][m], (__m512bh)LOAD(w + g * apart, v), (__m512bh)pair);
            }
        for (int g = 0; g < groups; g++)
            for (int m = 0; m < rows; m++) total[g][m] = ADD_BLOCK(total[g][m], sum[g][m], scale[PANEL * g + b], bits);
    }
    for (int g = 0; g < groups; g++)
        for (int m = 0; m < rows; m++) _mm512_storeu_ps(totals + (m * groups + g) * MX_ROWS, total[g][m]);
}

MX_INLINE BF16 void multiply_wide(const mx_job *job, int64_t group, float *totals, const int groups, const int bits, const int integer) {
    const mx_layer *l = job->layer;
    const int64_t blocks = l->k / MX_BLOCK;
    const int half_bytes = 32 * bits;
    const mx_table table = bits == 8 ? mx_load_byte_table(job) : mx_load_table(job);
    __m512i decoded[2 * 16 * PANEL];
    __m512 scale[2 * PANEL];
    __builtin_memset(totals, 0, (size_t)job->m * groups * MX_ROWS * sizeof(float));
    for (int64_t b0 = 0; b0 < blocks; b0 += PANEL) {
        const int64_t count = blocks - b0 < PANEL ? blocks - b0 : PANEL;
        for (int g = 0; g < groups; g++) {
            const uint8_t *codes = mx_group_codes(l, group + g) + b0 * 2 * half_bytes, *scales = mx_group_scales(l, group + g);
            for (int64_t half = 0; bits < 16 && half < 2 * count; half++)
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++)
                    decode_two(codes + half * half_bytes, &table, decoded + 16 * PANEL * g + 8 * half + 2 * j, j, bits, integer);
            for (int64_t b = 0; bits < 16 && b < count; b++) scale[PANEL * g + b] = mx_load_scales(scales + (b0 + b) * MX_ROWS);
        }
        /* codes of 16 bits are the numbers, where they lie */
        const uint8_t *first = mx_group_codes(l, group), *w = bits < 16 ? (const uint8_t *)decoded : first + b0 * 2 * half_bytes;
        const int64_t apart = bits < 16 ? 1024 * PANEL : groups < 2 ? 0 : mx_group_codes(l, group + 1) - first;
        for (int64_t m0 = 0; m0 < job->m; m0 += 8) {
            const int64_t rows = job->m - m0 < 8 ? job->m - m0 : 8, panel = count * 2 * half_bytes;
            const int32_t *x = (const int32_t *)job->x + m0 * l->k / 2 + b0 * 16 * rows;
            for (int g = 0; g < groups; g++) {
                const uint8_t *next = b0 + count < blocks ? mx_group_codes(l, group + g) + (b0 + count) * 2 * half_bytes : mx_group_codes(l, group + groups + g);
                ask(next + panel * m0 / job->m, next + panel * (m0 + rows) / job->m);
            }
#define PANEL_ROWS(R) case R: panel_rows(w, apart, scale, x, totals + m0 * groups * MX_ROWS, count, groups, R, bits); break;
            switch (rows) {
                PANEL_ROWS(1) PANEL_ROWS(2) PANEL_ROWS(3) PANEL_ROWS(4) PANEL_ROWS(5) PANEL_ROWS(6) PANEL_ROWS(7) PANEL_ROWS(8)
            }
        }
    }
    for (int64_t m = 0; m < job->m; m++)
        for (int g = 0; g < groups; g++) store_row(job, m, group + g, _mm512_loadu_ps(totals + (m * groups + g) * MX_ROWS));
}

/* How many groups to take at once: see `multiply`. Memory is read faster from few places than from many; short weights, and those of 16 bits that many rows
 * share, from one. */
MX_INLINE int side_by_side(int64_t m, int64_t k, int64_t left, const int bits) {
    if (left >= 4 && (bits == 16 ? m == 1 : bits == 4 && (m == 3 || m == 4))) return 4;
    if (left < 2 || (bits == 16 ? m <= WIDE && m > (k <= SHORT ? 2 : 8) : m == 1 && k <= SHORT)) return 1;
    return 2;
}

#define ALL(G, SEVERAL) AT(G, 1, SEVERAL) AT(G, 2, SEVERAL) AT(G, 3, SEVERAL) AT(G, 4, SEVERAL) AT(G, 5, SEVERAL) AT(G, 6, SEVERAL) AT(G, 7, SEVERAL) AT(G, 8, SEVERAL)
#define AT(G, R, SEVERAL) case R: multiply(job, group, m0, G, R, bits, integer, SEVERAL); break;

MX_INLINE BF16 void run(const mx_job *job, int64_t group, int64_t last, const int bits, const int integer) {
    const int64_t m = job->m;
    float *totals = m > WIDE ? malloc((size_t)(2 * m * MX_ROWS) * sizeof(float)) : NULL;
    for (int groups; group < last; group += groups) {
        groups = side_by_side(m, job->layer->k, last - group, bits);
        if (totals && groups == 2) multiply_wide(job, group, totals, 2, bits, integer);
        else if (totals) multiply_wide(job, group, totals, 1, bits, integer);
        for (int64_t m0 = totals ? m : 0; m0 < m; m0 += 8) { /* all rows at once, unless there was no memory for `totals` */
            const int64_t rows = m - m0 < 8 ? m - m0 : 8;
            if (groups == 4) switch (rows) { AT(4, 1, 0) AT(4, 3, 0) AT(4, 4, 0) }
            else if (groups == 2) switch (rows) { ALL(2, 0) }
            else if (bits == 16 && m > 8) switch (rows) { ALL(1, 1) }
            else switch (rows) { ALL(1, 0) }
        }
    }
    free(totals);
}

BY_WIDTH(mx_run_avx512_bf16, TARGET_BF16)
#endif
