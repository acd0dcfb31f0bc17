/* float32 weights, which nothing has to decode: a tile is, for one of its 32 inputs after another, the weights of its 16 rows. With TARGET,
 * RUN, LANES (numbers of a vector), MOST (rows of x at once), SPLAT(x) and MULADD(a, b, c) as in the files that include this one. One row's
 * result is made by the same operations in the same order whatever the number of rows: per block a fresh sum, then that onto the total. */
#include "mx.h"

#include <stdlib.h>

#define PARTS (MX_ROWS / LANES)
#define TILE (MX_ROWS * MX_BLOCK)
#define AHEAD 32768 /* bytes of weights that are asked for in advance, into the second-level cache */
#define PANEL 8     /* blocks that stay in the first-level cache while many rows of x pass by */
#define WIDE 32     /* rows above which that pays */

typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4)));

/* totals [rows, 16] += `blocks` tiles from w on times rows of x; fresh: the totals begin with zero. */
MX_INLINE TARGET void multiply(const mx_job *job, const float *w, const float *x, float *totals, int64_t blocks, const int fresh, const int rows) {
    const int64_t x_row = job->x_row, x_block = job->x_block;
    lanes total[8][PARTS], sum[8][PARTS];
#pragma GCC unroll 8
    for (int m = 0; m < rows; m++)
#pragma GCC unroll 4
        for (int p = 0; p < PARTS; p++) total[m][p] = fresh ? (lanes){0} : *(const lanes *)(totals + m * MX_ROWS + p * LANES);
    for (int64_t b = 0; b < blocks; b++, w += TILE, x += x_block) {
        for (int line = 0; fresh && line < TILE; line += 16) __builtin_prefetch((const char *)(w + line) + AHEAD, 0, 2);
#pragma GCC unroll 8
        for (int m = 0; m < rows; m++)
#pragma GCC unroll 4
            for (int p = 0; p < PARTS; p++) sum[m][p] = (lanes){0};
#pragma GCC unroll 4
        for (int i = 0; i < MX_BLOCK; i++)
#pragma GCC unroll 4
            for (int p = 0; p < PARTS; p++) {
                const lanes weight = *(const lanes *)(w + i * MX_ROWS + p * LANES);
#pragma GCC unroll 8
                for (int m = 0; m < rows; m++) sum[m][p] = MULADD(weight, SPLAT(x[m * x_row + i]), sum[m][p]);
            }
#pragma GCC unroll 8
        for (int m = 0; m < rows; m++)
#pragma GCC unroll 4
            for (int p = 0; p < PARTS; p++) total[m][p] += sum[m][p];
    }
#pragma GCC unroll 8
    for (int m = 0; m < rows; m++)
#pragma GCC unroll 4
        for (int p = 0; p < PARTS; p++) *(lanes *)(totals + m * MX_ROWS + p * LANES) = total[m][p];
}

#define CASE(R) case R: if (R <= MOST) multiply(job, w, x, totals, blocks, fresh, R); break;

MX_INLINE TARGET void multiply_up_to(const mx_job *job, int64_t rows, const float *w, const float *x, float *totals, int64_t blocks, const int fresh) {
    switch (rows < MOST ? rows : MOST) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) }
}

MX_INLINE void store(const mx_job *job, int64_t group, int64_t m0, const float *totals, int64_t rows) {
    const int64_t left = job->layer->n - group * MX_ROWS;
    for (int64_t m = 0; m < rows; m++) mx_store(job, m0 + m, group * MX_ROWS, totals + m * MX_ROWS, left < MX_ROWS ? left : MX_ROWS);
}

TARGET void RUN(const mx_job *job, int64_t first, int64_t last) {
    const int64_t blocks = job->layer->k / MX_BLOCK;
    const float *x = job->x;
    float few[MOST * MX_ROWS], *totals = job->m > WIDE ? malloc((size_t)job->m * MX_ROWS * sizeof(float)) : NULL;
    for (int64_t group = first; group < last; group++) {
        const float *w = (const float *)(const void *)mx_group_codes(job->layer, group);
        for (int64_t m0 = 0; m0 < job->m && !totals; m0 += MOST) {
            multiply_up_to(job, job->m - m0, w, x + m0 * job->x_row, few, blocks, 1);
            store(job, group, m0, few, job->m - m0 < MOST ? job->m - m0 : MOST);
        }
        if (!totals) continue;
        __builtin_memset(totals, 0, (size_t)job->m * MX_ROWS * sizeof(float));
        for (int64_t b = 0; b < blocks; b += PANEL)
            for (int64_t m0 = 0; m0 < job->m; m0 += MOST)
                multiply_up_to(job, job->m - m0, w + b * TILE, x + m0 * job->x_row + b * job->x_block, totals + m0 * MX_ROWS,
                               blocks - b < PANEL ? blocks - b : PANEL, 0);
        store(job, group, 0, totals, job->m);
    }
    free(totals);
}
