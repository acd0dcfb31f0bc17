/* Tiles times any number of rows of x on AVX-512: few512.h's, where of each pair of inputs the second one's product comes first. So computes a bfloat16 dot product of
 * Intel's processors, and so two fused multiply-adds. With what few512.h takes, and
 *   RUN                  the function that is not static
 *   IN_PLACE             whether `weights` are the vectors themselves
 *   PANEL_UNROLL         how the loop over the decoded pairs of a block is unrolled
 *   WIDE, PANEL          rows above which decoding once pays for writing the result down, and how many blocks of one or two groups are decoded at once
 *   side_by_side(m, k, left, bits)    how many groups to take at once; FOURS(AT): for how many rows that may be four; ALONE: whether few rows often take one
 */
#include <stdlib.h>

typedef __m512 partial;
#define WHOLE(sum) (sum)
#include "few512.h"

/* Many rows of x: stretches of PANEL blocks of one or two groups are decoded once, into the first-level cache, and multiplied by all rows.
 * The order of the sums is that of `multiply`. w: the weights of the first group, `apart` before those of the second. */
MX_INLINE ROWS512 void panel_rows(const weights *w, const int64_t apart, const __m512 *scale, const pair *x, float *totals, int64_t blocks,
                                  const int groups, const int rows, const int scaled) {
    __m512 total[8][2];
    for (int m = 0; m < rows; m++)
        for (int g = 0; g < groups; g++) total[m][g] = _mm512_loadu_ps(totals + (m * groups + g) * MX_ROWS);
    for (int64_t b = 0; b < blocks; b++, w += 16, x += rows * 16) {
        __m512 sum[8][2];
        for (int m = 0; m < rows; m++)
            for (int g = 0; g < groups; g++) sum[m][g] = _mm512_setzero_ps();
        PANEL_UNROLL
        for (int v = 0; v < 16; v++) {
            weights ready[2];
#pragma GCC unroll 2
            for (int g = 0; g < groups; g++) ready[g] = w[g * apart + v];
#pragma GCC unroll 8
            for (int m = 0; m < rows; m++) add_products(sum[m], ready, x + v * rows + m, groups);
        }
        for (int m = 0; m < rows; m++)
            for (int g = 0; g < groups; g++) total[m][g] = ADD_BLOCK(total[m][g], sum[m][g], scale[PANEL * g + b], scaled);
    }
    for (int m = 0; m < rows; m++)
        for (int g = 0; g < groups; g++) _mm512_storeu_ps(totals + (m * groups + g) * MX_ROWS, total[m][g]);
}

/* panel_rows for 1 .. 8 rows, a function for each number of groups, with scales and without: whatever the codes were, what is decoded looks alike. */
#define PANEL_ROWS(R) case R: panel_rows(w, apart, scale, x, totals, blocks, groups, R, scaled); break;
#define PANELS(NAME, GROUPS, SCALED)                                                                                                                   \
    static ROWS512 __attribute__((noinline)) void NAME(const weights *w, const int64_t apart, const __m512 *scale, const pair *x, float *totals,      \
                                                       int64_t blocks, int64_t rows) {                                                                 \
        const int groups = GROUPS, scaled = SCALED;                                                                                                    \
        switch (rows) {                                                                                                                                \
            PANEL_ROWS(1) PANEL_ROWS(2) PANEL_ROWS(3) PANEL_ROWS(4) PANEL_ROWS(5) PANEL_ROWS(6) PANEL_ROWS(7) PANEL_ROWS(8)                             \
        }                                                                                                                                              \
    }
PANELS(dense_alone, 1, 0)
PANELS(dense_two, 2, 0)
PANELS(scaled_alone, 1, 1)
PANELS(scaled_two, 2, 1)

/* Row groups group .. group + groups - 1 times rows m0 .. m0 + m - 1 of x. totals: memory for their results. */
MX_INLINE ROWS512 void multiply_wide(const mx_job *job, int64_t group, int64_t m0, int64_t m, float *totals, const int groups, const int bits,
                                     const int integer) {
    const mx_layer *l = job->layer;
    const int64_t blocks = l->k / MX_BLOCK;
    const int half_bytes = 32 * bits, in_place = bits == 16 && IN_PLACE; /* codes that are the weights, where they lie */
    const mx_table table = TABLE(job, bits);
    weights decoded[2 * 16 * PANEL];
    __m512 scale[2 * PANEL];
    __builtin_memset(totals, 0, (size_t)m * groups * MX_ROWS * sizeof(float));
    for (int64_t b0 = 0; b0 < blocks; b0 += PANEL) {
        const int64_t count = blocks - b0 < PANEL ? blocks - b0 : PANEL;
        for (int g = 0; g < groups; g++) {
            const uint8_t *codes = mx_group_codes(l, group + g) + b0 * 2 * half_bytes, *scales = mx_group_scales(l, group + g);
            for (int64_t half = 0; !in_place && half < 2 * count; half++)
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++) {
                    __m512i w[2];
                    decode_two(codes + half * half_bytes, &table, w, j, bits, integer);
                    for (int i = 0; i < 2; i++) decoded[16 * PANEL * g + 8 * half + 2 * j + i] = PREPARE(w[i]);
                }
            for (int64_t b = 0; bits < 16 && b < count; b++) scale[PANEL * g + b] = mx_load_scales(scales + (b0 + b) * MX_ROWS);
        }
        const uint8_t *first = mx_group_codes(l, group);
        const weights *w = in_place ? (const weights *)(const void *)(first + b0 * 2 * half_bytes) : decoded;
        const int64_t apart = !in_place ? 16 * PANEL : groups < 2 ? 0 : (mx_group_codes(l, group + 1) - first) / (int64_t)sizeof(weights);
        for (int64_t r = 0; r < m; r += 8) {
            const int64_t rows = m - r < 8 ? m - r : 8, panel = count * 2 * half_bytes;
            const pair *x = (const pair *)job->x + (m0 + r) * l->k / 2 + b0 * 16 * rows;
            for (int g = 0; g < groups; g++) {
                const uint8_t *next = b0 + count < blocks ? mx_group_codes(l, group + g) + (b0 + count) * 2 * half_bytes : mx_group_codes(l, group + groups + g);
                ask(next + panel * r / m, next + panel * (r + rows) / m);
            }
            (bits == 16 ? groups == 2 ? dense_two : dense_alone : groups == 2 ? scaled_two : scaled_alone)(w, apart, scale, x, totals + r * groups * MX_ROWS, count, rows);
        }
    }
    for (int64_t r = 0; r < m; r++)
        for (int g = 0; g < groups; g++) store_row(job, m0 + r, group + g, _mm512_loadu_ps(totals + (r * groups + g) * MX_ROWS));
}

#define ALL(G, SEVERAL) AT(G, 1, SEVERAL) AT(G, 2, SEVERAL) AT(G, 3, SEVERAL) AT(G, 4, SEVERAL) AT(G, 5, SEVERAL) AT(G, 6, SEVERAL) AT(G, 7, SEVERAL) AT(G, 8, SEVERAL)
#define AT(G, R, SEVERAL) case R: multiply(job, group, m0, G, R, bits, integer, SEVERAL); break;

MX_INLINE ROWS512 void run(const mx_job *job, int64_t group, int64_t last, const int bits, const int integer) {
    const int64_t m = job->m;
    _Alignas(64) float few[8 * MX_ROWS], *totals = m > WIDE ? aligned_alloc(64, (size_t)(2 * m * MX_ROWS) * sizeof(float)) : NULL;
    for (int groups; group < last; group += groups) {
        groups = side_by_side(m, job->layer->k, last - group, bits);
        for (int64_t m0 = 0, rows; m0 < m; m0 += rows) { /* all rows at once, unless there was no memory for `totals` */
            rows = totals || m - m0 < 8 ? m - m0 : 8;
            if (totals && groups == 2) multiply_wide(job, group, m0, rows, totals, 2, bits, integer);
            else if (totals || (groups == 1 && !ALONE)) multiply_wide(job, group, m0, rows, totals ? totals : few, 1, bits, integer);
            else if (groups == 4) switch (rows) { FOURS(AT) }
            else if (groups == 2) switch (rows) { ALL(2, 0) }
            else if (bits == 16 && m > 8) switch (rows) { ALL(1, 1) }
            else switch (rows) { ALL(1, 0) }
        }
    }
    free(totals);
}

BY_WIDTH(RUN, TARGET512)
