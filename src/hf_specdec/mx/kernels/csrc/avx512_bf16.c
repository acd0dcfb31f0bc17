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
#define AHEAD 2048 /* bytes of codes that are asked for in advance */
#define SHORT 1024 /* inputs up to which two streams of 16-bit weights are read more slowly than one */

DECODE_HALF(decode_half, TARGET_BF16, SPLIT2_VBMI2, SPLIT7_VBMI2, BYTES_VBMI)

/* Ask for codes [from, to), which will be read in the second-level cache's time: the next group's or panel's, spread over the work on
 * this one, so that memory is read all the time. */
MX_INLINE void ask(const uint8_t *from, const uint8_t *to) {
    for (from = (const uint8_t *)((uintptr_t)from & ~(uintptr_t)63); from < to; from += 64) _mm_prefetch((const char *)from, _MM_HINT_T1);
}

/* Row groups group .. group + groups - 1 times rows m0 .. m0 + rows - 1 of x. Two or four groups at once, where there are few
 * rows, keep the dot-product unit busy: each of them is a chain of dependent sums. */
MX_INLINE __attribute__((target(TARGET_BF16))) void multiply(const mx_job *job, int64_t group, int64_t m0, const int groups,
                                                            const int rows, const int bits, const int integer,
                                                            const int several) {
    const mx_layer *l = job->layer;
    const int64_t k = l->k, blocks = k / MX_BLOCK;
    const int half_bytes = 32 * bits;
    const mx_table table = bits == 8 ? mx_load_byte_table(job) : mx_load_table(job);
    const int32_t *x = (const int32_t *)job->x + m0 * k / 2; /* pairs, packed as in mx_pack_pairs */
    const int64_t share = several ? blocks * 2 * half_bytes / ((job->m + 7) / 8) : 0; /* of the next group: what these rows' turn asks for */
    const uint8_t *codes[4], *scales[4];
    for (int g = 0; g < groups; g++) codes[g] = mx_group_codes(l, group + g), scales[g] = mx_group_scales(l, group + g);
    const int64_t ahead = (AHEAD + 2 * half_bytes - 1) / (2 * half_bytes); /* blocks; behind the last one those of the groups that come next */
    __m512 total[4][8];
    for (int g = 0; g < groups; g++)
        for (int m = 0; m < rows; m++) total[g][m] = _mm512_setzero_ps();
    for (int64_t b = 0; b < blocks; b++, x += rows * MX_BLOCK / 2) {
        __m512 sum[4][8];
        for (int g = 0; g < groups; g++)
            for (int m = 0; m < rows; m++) sum[g][m] = _mm512_setzero_ps();
        if (bits < 16) {
            const int64_t to = b + ahead < blocks ? b + ahead : b + ahead + (groups - 1) * blocks;
            for (int g = 0; g < groups; g++)
                for (int line = 0; line < 2 * half_bytes; line += 64)
                    _mm_prefetch((const char *)codes[g] + to * 2 * half_bytes + line, _MM_HINT_T0);
        }
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
#pragma GCC unroll 4
            for (int g = 0; g < groups; g++) {
                __m512i w[8];
                const uint8_t *at = codes[g] + (2 * b + half) * half_bytes;
                decode_half(at, &table, w, bits, integer);
                if (bits == 16 && !several)
                    for (int line = 0; line < half_bytes; line += 64) _mm_prefetch((const char *)at + line + AHEAD, _MM_HINT_T0);
#pragma GCC unroll 8
                for (int v = 0; v < 8; v++)
#pragma GCC unroll 8
                    for (int m = 0; m < rows; m++) {
                        __m512i pair = _mm512_set1_epi32(x[(8 * half + v) * rows + m]);
                        sum[g][m] = _mm512_dpbf16_ps(sum[g][m], (__m512bh)w[v], (__m512bh)pair);
                    }
            }
        }
        if (several) {
            const uint8_t *next = codes[0] + blocks * 2 * half_bytes + m0 / 8 * share;
            ask(next + b * share / blocks, next + (b + 1) * share / blocks);
        }
        for (int g = 0; g < groups; g++) {
            __m512 scale = bits == 16 ? _mm512_setzero_ps() : mx_load_scales(scales[g] + b * MX_ROWS);
            for (int m = 0; m < rows; m++)
                total[g][m] = bits == 16 ? _mm512_add_ps(total[g][m], sum[g][m])
                                         : _mm512_fmadd_ps(sum[g][m], scale, total[g][m]);
        }
    }
    for (int g = 0; g < groups; g++)
        for (int m = 0; m < rows; m++) store_row(job, m0 + m, group + g, total[g][m]);
}

/* Many rows of x: stretches of PANEL blocks are decoded once, into the first-level cache, and multiplied by all of them. The
 * order of the sums is that of `multiply`. */
#define PANEL 16
#define WIDE 32 /* rows above which decoding once pays for writing the result down */

MX_INLINE __attribute__((target(TARGET_BF16))) void panel_rows(const __m512i *w, const __m512 *scale, const int32_t *x,
                                                              float *totals, int64_t blocks, const int rows, const int bits) {
    __m512 total[8];
    for (int m = 0; m < rows; m++) total[m] = _mm512_loadu_ps(totals + m * MX_ROWS);
    for (int64_t b = 0; b < blocks; b++, w += 16, x += rows * 16) {
        __m512 sum[8];
        for (int m = 0; m < rows; m++) sum[m] = _mm512_setzero_ps();
#pragma GCC unroll 16
        for (int v = 0; v < 16; v++)
#pragma GCC unroll 8
            for (int m = 0; m < rows; m++)
                sum[m] = _mm512_dpbf16_ps(sum[m], (__m512bh)w[v], (__m512bh)_mm512_set1_epi32(x[v * rows + m]));
        for (int m = 0; m < rows; m++)
            total[m] = bits == 16 ? _mm512_add_ps(total[m], sum[m]) : _mm512_fmadd_ps(sum[m], scale[b], total[m]);
    }
    for (int m = 0; m < rows; m++) _mm512_storeu_ps(totals + m * MX_ROWS, total[m]);
}

MX_INLINE __attribute__((target(TARGET_BF16))) void multiply_wide(const mx_job *job, int64_t group, float *totals,
                                                                 const int bits, const int integer) {
    const mx_layer *l = job->layer;
    const int64_t blocks = l->k / MX_BLOCK;
    const int half_bytes = 32 * bits;
    const mx_table table = bits == 8 ? mx_load_byte_table(job) : mx_load_table(job);
    const uint8_t *codes = mx_group_codes(l, group), *scales = mx_group_scales(l, group);
    __m512i w[16 * PANEL];
    __m512 scale[PANEL];
    __builtin_memset(totals, 0, (size_t)job->m * MX_ROWS * sizeof(float));
    for (int64_t b0 = 0; b0 < blocks; b0 += PANEL) {
        const int64_t count = blocks - b0 < PANEL ? blocks - b0 : PANEL;
        for (int64_t b = 0; b < count; b++) {
            decode_half(codes + (b0 + b) * 2 * half_bytes, &table, w + 16 * b, bits, integer);
            decode_half(codes + (b0 + b) * 2 * half_bytes + half_bytes, &table, w + 16 * b + 8, bits, integer);
            scale[b] = bits == 16 ? _mm512_setzero_ps() : mx_load_scales(scales + (b0 + b) * MX_ROWS);
        }
        const uint8_t *next = codes + (b0 + count) * 2 * half_bytes;
        for (int64_t m0 = 0; m0 < job->m; m0 += 8) {
            const int64_t rows = job->m - m0 < 8 ? job->m - m0 : 8;
            const int32_t *x = (const int32_t *)job->x + m0 * l->k / 2 + b0 * 16 * rows;
            ask(next + count * 2 * half_bytes * m0 / job->m, next + count * 2 * half_bytes * (m0 + rows) / job->m);
#define PANEL_ROWS(R) case R: panel_rows(w, scale, x, totals + m0 * MX_ROWS, count, R, bits); break;
            switch (rows) {
                PANEL_ROWS(1) PANEL_ROWS(2) PANEL_ROWS(3) PANEL_ROWS(4) PANEL_ROWS(5) PANEL_ROWS(6) PANEL_ROWS(7) PANEL_ROWS(8)
            }
        }
    }
    for (int64_t m = 0; m < job->m; m++) store_row(job, m, group, _mm512_loadu_ps(totals + m * MX_ROWS));
}

#define SIDE_BY_SIDE(G, R) case R: multiply(job, group, 0, G, R, bits, integer, 0); break;
#define ROWS(R) case R: multiply(job, group, m0, 1, R, bits, integer, 0); break;
#define TURN(R) case R: multiply(job, group, m0, 1, R, bits, integer, 1); break;

MX_INLINE __attribute__((target(TARGET_BF16))) void run(const mx_job *job, int64_t group, int64_t last, const int bits,
                                                       const int integer) {
    float *totals = job->m > WIDE ? malloc((size_t)job->m * MX_ROWS * sizeof(float)) : NULL;
    const int64_t pairs = bits == 16 && job->layer->k <= SHORT ? 2 : 4; /* most rows with two groups side by side */
    for (int step = 1; group < last; group += step) {
        step = job->m == 1 && group + 4 <= last ? 4 : job->m <= pairs && group + 2 <= last ? 2 : 1;
        if (totals) {
            multiply_wide(job, group, totals, bits, integer);
        } else if (step == 4) {
            multiply(job, group, 0, 4, 1, bits, integer, 0);
        } else if (step == 2) {
            switch (job->m) { SIDE_BY_SIDE(2, 1) SIDE_BY_SIDE(2, 2) SIDE_BY_SIDE(2, 3) SIDE_BY_SIDE(2, 4) }
        } else if (bits == 16 && job->m > 8) {
            for (int64_t m0 = 0; m0 < job->m; m0 += 8)
                switch (job->m - m0 < 8 ? job->m - m0 : 8) {
                    TURN(1) TURN(2) TURN(3) TURN(4) TURN(5) TURN(6) TURN(7) TURN(8)
                }
        } else {
            for (int64_t m0 = 0; m0 < job->m; m0 += 8) /* once, unless there was no memory for `totals` */
                switch (job->m - m0 < 8 ? job->m - m0 : 8) {
                    ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) ROWS(7) ROWS(8)
                }
        }
    }
    free(totals);
}

BY_WIDTH(mx_run_avx512_bf16, TARGET_BF16)
#endif
