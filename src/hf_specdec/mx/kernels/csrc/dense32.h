/* float32 weights, which nothing has to decode: a tile is, for one of its 32 inputs after another, the weights of its 16 rows. With TARGET,
 * RUN, LANES (numbers of a vector), MOST (rows of x at once), GROUPS (row groups at once, if rows are many), SPLAT(x) and MULADD(a, b, c) as in the files that
 * include this one. One row's result is made by the same operations in the same order whatever the number of rows: per block a fresh sum, then that onto the total. */
#include "mx.h"

#include <stdlib.h>

#define PARTS (MX_ROWS / LANES)
#define TILE (MX_ROWS * MX_BLOCK)
#define AHEAD 8192 /* weights that are asked for in advance, into the second-level cache */
#define PANEL 8     /* blocks that stay in the first-level cache while many rows of x pass by */
#define WIDE MOST   /* rows above which that pays */
#define FEW 2       /* rows of x up to which memory is read faster from one place */

typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4)));

/* totals [rows, groups, 16] += `blocks` tiles from w on, and from `apart` numbers further on for the second group, times rows of x; fresh: the totals begin with zero.
 * Beside every tile, `lines` lines of 64 bytes are asked for, from `next` on. */
MX_INLINE TARGET void multiply(const mx_job *job, const float *w, int64_t apart, const float *x, float *totals, int64_t blocks, const float *next, const int64_t lines,
                               const int fresh, const int rows, const int groups) {
    const int64_t x_row = job->x_row, x_block = job->x_block;
    const int parts = groups * PARTS;
    lanes total[8][GROUPS * PARTS], sum[8][GROUPS * PARTS];
#pragma GCC unroll 8
    for (int m = 0; m < rows; m++)
#pragma GCC unroll 4
        for (int p = 0; p < parts; p++) total[m][p] = fresh ? (lanes){0} : *(const lanes *)(totals + (m * parts + p) * LANES);
    for (int64_t b = 0; b < blocks; b++, w += TILE, x += x_block, next += 16 * lines) {
        for (int64_t line = 0; line < lines; line++)
            for (int g = 0; g < groups; g++) __builtin_prefetch(next + g * apart + 16 * line, 0, 2);
#pragma GCC unroll 8
        for (int m = 0; m < rows; m++)
#pragma GCC unroll 4
            for (int p = 0; p < parts; p++) sum[m][p] = (lanes){0};
#pragma GCC unroll 4
        for (int i = 0; i < MX_BLOCK; i++) {
            lanes weight[GROUPS * PARTS];
#pragma GCC unroll 4
            for (int p = 0; p < parts; p++) weight[p] = *(const lanes *)(w + p / PARTS * apart + i * MX_ROWS + p % PARTS * LANES);
#pragma GCC unroll 8
            for (int m = 0; m < rows; m++) {
                const lanes input = SPLAT(x[m * x_row + i]);
#pragma GCC unroll 4
                for (int p = 0; p < parts; p++) sum[m][p] = MULADD(weight[p], input, sum[m][p]);
            }
        }
#pragma GCC unroll 8
        for (int m = 0; m < rows; m++)
#pragma GCC unroll 4
            for (int p = 0; p < parts; p++) total[m][p] += sum[m][p];
    }
#pragma GCC unroll 8
    for (int m = 0; m < rows; m++)
#pragma GCC unroll 4
        for (int p = 0; p < parts; p++) *(lanes *)(totals + (m * parts + p) * LANES) = total[m][p];
}

#define CASE(R) case R: if (R <= MOST) multiply(job, w, apart, x, totals, blocks, next, lines, fresh, R, groups); break;

MX_INLINE TARGET void multiply_up_to(const mx_job *job, int64_t rows, const float *w, int64_t apart, const float *x, float *totals, int64_t blocks,
                                     const float *next, const int64_t lines, const int fresh, const int groups) {
    switch (rows < MOST ? rows : MOST) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) }
}

MX_INLINE void store(const mx_job *job, int64_t group, int64_t m0, const float *totals, int64_t rows, const int groups) {
    for (int64_t m = 0; m < rows; m++)
        for (int g = 0; g < groups; g++) {
            const int64_t from = (group + g) * MX_ROWS, left = job->layer->n - from;
            mx_store(job, m0 + m, from, totals + (m * groups + g) * MX_ROWS, left < MX_ROWS ? left : MX_ROWS);
        }
}

/* All rows of x times one or two row groups. all: memory for the totals of many rows, or NULL. */
MX_INLINE TARGET void multiply_groups(const mx_job *job, int64_t group, float *all, const int groups) {
    const int64_t blocks = job->layer->k / MX_BLOCK;
    const float *w = (const float *)(const void *)mx_group_codes(job->layer, group), *x = job->x;
    const int64_t apart = groups > 1 ? (const float *)(const void *)mx_group_codes(job->layer, group + 1) - w : 0;
    float few[MOST * GROUPS * MX_ROWS];
    for (int64_t m0 = 0; m0 < job->m && !all; m0 += MOST) {
        multiply_up_to(job, job->m - m0, w, apart, x + m0 * job->x_row, few, blocks, w + AHEAD, TILE / 16, 1, groups);
        store(job, group, m0, few, job->m - m0 < MOST ? job->m - m0 : MOST, groups);
    }
    if (!all) return;
    __builtin_memset(all, 0, (size_t)(job->m * groups * MX_ROWS) * sizeof(float));
    const int64_t chunks = (job->m + MOST - 1) / MOST, lines = (TILE / 16 + chunks - 1) / chunks; /* of the next panel, spread over the work on this one */
    for (int64_t b = 0; b < blocks; b += PANEL)
        for (int64_t m0 = 0; m0 < job->m; m0 += MOST)
            multiply_up_to(job, job->m - m0, w + b * TILE, apart, x + m0 * job->x_row + b * job->x_block, all + m0 * groups * MX_ROWS,
                           blocks - b < PANEL ? blocks - b : PANEL, w + (b + PANEL) * TILE + m0 / MOST * PANEL * lines * 16, lines, 0, groups);
    store(job, group, 0, all, job->m, groups);
}

TARGET void RUN(const mx_job *job, int64_t first, int64_t last) {
    float *all = job->m > WIDE ? aligned_alloc(64, (size_t)(job->m * GROUPS * MX_ROWS) * sizeof(float)) : NULL;
    if (GROUPS > 1 && job->m > FEW)
        for (; first + GROUPS <= last; first += GROUPS) multiply_groups(job, first, all, GROUPS);
    for (; first < last; first++) multiply_groups(job, first, all, 1);
    free(all);
}
