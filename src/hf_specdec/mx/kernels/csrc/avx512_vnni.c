/* Layers whose activations are rounded to MXINT8, on AVX-512 VNNI with VBMI: exact integer dot products, four inputs to a lane. Weights of
 * E2M3, E2M1 and INT8 are small integers times a power of two; as the instruction wants one side unsigned, an offset is added to them, and
 * its share of the sum is where each sum begins. One row's result is made by the same instructions in the same order whatever the
 * number of rows: per block of 32, eight dot products, then sum * scale of the weights * scale of x into the total. */
#include "mx.h"

#if defined(__x86_64__)
#include <stdlib.h>

#include "vnni512.h"

/* One chunk of x [m, k]. */
static VNNI void pack(const void *x, int dtype, int32_t *packed, int64_t chunk, int64_t m, const mx_layer *l) {
    const int64_t m0 = 8 * chunk, rows = m - m0 < 8 ? m - m0 : 8, blocks = l->k / MX_BLOCK;
    const __m256i places = places_of(l);
    const int offset = mx_offset(l);
    const float unit = mx_weight_unit(l);
    packed += m0 * blocks * WORDS;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t b = 0; b < blocks; b++) {
            const rounded block = round_block(x, dtype, (m0 + r) * l->k + b * MX_BLOCK, places, unit);
            int32_t four[8], *to = packed + b * WORDS * rows + r;
            _mm256_storeu_si256((__m256i *)four, block.bytes);
            for (int i = 0; i < 8; i++) to[i * rows] = four[i];
            to[8 * rows] = -offset * block.sum;
            to[9 * rows] = block.scale;
        }
}

/* Row groups group .. group + groups - 1 times rows m0 .. m0 + rows - 1 of x: several groups at once, as in avx512_bf16.c. */
MX_INLINE VNNI void multiply(const mx_job *job, int64_t group, int64_t m0, const int groups, const int rows, const int bits) {
    const mx_layer *l = job->layer;
    const int64_t blocks = l->k / MX_BLOCK;
    const int half_bytes = 32 * bits;
    const tables t = load_tables(l, mx_offset(l));
    const int32_t *x = (const int32_t *)job->x + m0 * blocks * WORDS;
    const uint8_t *codes[2], *scales[2];
    for (int g = 0; g < groups; g++) codes[g] = mx_group_codes(l, group + g), scales[g] = mx_group_scales(l, group + g);
    __m512 total[2][8];
    for (int g = 0; g < groups; g++)
        for (int m = 0; m < rows; m++) total[g][m] = _mm512_setzero_ps();
    for (int64_t b = 0; b < blocks; b++, x += rows * WORDS) {
        ask_ahead(codes, groups, b, blocks, 2 * half_bytes);
        __m512i sum[2][8];
        for (int m = 0; m < rows; m++)
            for (int g = 0; g < groups; g++) sum[g][m] = _mm512_set1_epi32(x[8 * rows + m]);
#pragma GCC unroll 8
        for (int v = 0; v < 8; v++) {
            __m512i w[2];
#pragma GCC unroll 4
            for (int g = 0; g < groups; g++) w[g] = decode_one(codes[g] + (2 * b + v / 4) * half_bytes, &t, v % 4, bits);
#pragma GCC unroll 8
            for (int m = 0; m < rows; m++) {
                const __m512i four = _mm512_set1_epi32(x[v * rows + m]);
#pragma GCC unroll 4
                for (int g = 0; g < groups; g++) sum[g][m] = _mm512_dpbusd_epi32(sum[g][m], w[g], four);
            }
        }
        for (int g = 0; g < groups; g++) {
            const __m512 scale = mx_load_scales(scales[g] + b * MX_ROWS);
            for (int m = 0; m < rows; m++) total[g][m] = ADD_BLOCK(total[g][m], sum[g][m], scale, x[9 * rows + m]);
        }
    }
    for (int g = 0; g < groups; g++)
        for (int m = 0; m < rows; m++) store_row(job, m0 + m, group + g, total[g][m]);
}

/* Many rows of x: stretches of PANEL blocks of one or two groups are decoded once, into the first-level cache, and multiplied by all rows. */
#define PANEL 16
#define WIDE 32 /* rows above which decoding once pays for writing the result down */

MX_INLINE VNNI void panel_rows(const __m512i *w, const __m512 *scale, const int32_t *x, float *totals, int64_t blocks, const int groups,
                               const int rows) {
    __m512 total[2][8];
    for (int g = 0; g < groups; g++)
        for (int m = 0; m < rows; m++) total[g][m] = _mm512_loadu_ps(totals + (m * groups + g) * MX_ROWS);
    for (int64_t b = 0; b < blocks; b++, w += 8, x += rows * WORDS) {
        __m512i sum[2][8];
        for (int m = 0; m < rows; m++)
            for (int g = 0; g < groups; g++) sum[g][m] = _mm512_set1_epi32(x[8 * rows + m]);
#pragma GCC unroll 8
        for (int v = 0; v < 8; v++)
#pragma GCC unroll 8
            for (int m = 0; m < rows; m++) {
                const __m512i four = _mm512_set1_epi32(x[v * rows + m]);
#pragma GCC unroll 2
                for (int g = 0; g < groups; g++) sum[g][m] = _mm512_dpbusd_epi32(sum[g][m], w[8 * PANEL * g + v], four);
            }
        for (int g = 0; g < groups; g++)
            for (int m = 0; m < rows; m++) total[g][m] = ADD_BLOCK(total[g][m], sum[g][m], scale[PANEL * g + b], x[9 * rows + m]);
    }
    for (int g = 0; g < groups; g++)
        for (int m = 0; m < rows; m++) _mm512_storeu_ps(totals + (m * groups + g) * MX_ROWS, total[g][m]);
}

MX_INLINE VNNI void multiply_wide(const mx_job *job, int64_t group, float *totals, const int groups, const int bits) {
    const mx_layer *l = job->layer;
    const int64_t blocks = l->k / MX_BLOCK;
    const int half_bytes = 32 * bits;
    const tables t = load_tables(l, mx_offset(l));
    __m512i w[2 * 8 * PANEL];
    __m512 scale[2 * PANEL];
    __builtin_memset(totals, 0, (size_t)job->m * groups * MX_ROWS * sizeof(float));
    for (int64_t b0 = 0; b0 < blocks; b0 += PANEL) {
        const int64_t count = blocks - b0 < PANEL ? blocks - b0 : PANEL;
        for (int g = 0; g < groups; g++) {
            const uint8_t *codes = mx_group_codes(l, group + g) + b0 * 2 * half_bytes, *scales = mx_group_scales(l, group + g);
            for (int64_t half = 0; half < 2 * count; half++)
#pragma GCC unroll 4
                for (int v = 0; v < 4; v++) w[8 * PANEL * g + 4 * half + v] = decode_one(codes + half * half_bytes, &t, v, bits);
            for (int64_t b = 0; b < count; b++) scale[PANEL * g + b] = mx_load_scales(scales + (b0 + b) * MX_ROWS);
        }
        for (int64_t m0 = 0; m0 < job->m; m0 += 8) {
            const int64_t rows = job->m - m0 < 8 ? job->m - m0 : 8, panel = count * 2 * half_bytes;
            const int32_t *x = (const int32_t *)job->x + (m0 * blocks + b0 * rows) * WORDS;
            for (int g = 0; g < groups; g++) {
                const uint8_t *next = mx_group_codes(l, group + g) + (b0 + count) * 2 * half_bytes;
                ask(next + panel * m0 / job->m, next + panel * (m0 + rows) / job->m);
            }
#define PANEL_ROWS(R) case R: panel_rows(w, scale, x, totals + m0 * groups * MX_ROWS, count, groups, R); break;
            switch (rows) {
                PANEL_ROWS(1) PANEL_ROWS(2) PANEL_ROWS(3) PANEL_ROWS(4) PANEL_ROWS(5) PANEL_ROWS(6) PANEL_ROWS(7) PANEL_ROWS(8)
            }
        }
    }
    for (int64_t m = 0; m < job->m; m++)
        for (int g = 0; g < groups; g++) store_row(job, m, group + g, _mm512_loadu_ps(totals + (m * groups + g) * MX_ROWS));
}

#define ALL(G) AT(G, 1) AT(G, 2) AT(G, 3) AT(G, 4) AT(G, 5) AT(G, 6) AT(G, 7) AT(G, 8)
#define AT(G, R) case R: multiply(job, group, m0, G, R, bits); break;

MX_INLINE VNNI void run(const mx_job *job, int64_t group, int64_t last, const int bits) {
    const int64_t m = job->m;
    float *totals = m > WIDE ? aligned_alloc(64, (size_t)(2 * m * MX_ROWS) * sizeof(float)) : NULL;
    for (int groups; group < last; group += groups) {
        groups = m > 2 && group + 2 <= last ? 2 : 1; /* one or two rows wait for memory alone, which is read faster from one place */
        if (totals && groups == 2) multiply_wide(job, group, totals, 2, bits);
        else if (totals) multiply_wide(job, group, totals, 1, bits);
        for (int64_t m0 = totals ? m : 0; m0 < m; m0 += 8) {
            const int64_t rows = m - m0 < 8 ? m - m0 : 8;
            if (groups == 2) switch (rows) { ALL(2) }
            else switch (rows) { ALL(1) }
        }
    }
    free(totals);
}

static VNNI __attribute__((noinline)) void run4(const mx_job *job, int64_t first, int64_t last) { run(job, first, last, 4); }
static VNNI __attribute__((noinline)) void run6(const mx_job *job, int64_t first, int64_t last) { run(job, first, last, 6); }
static VNNI __attribute__((noinline)) void run8(const mx_job *job, int64_t first, int64_t last) { run(job, first, last, 8); }

static void product(const mx_job *job, int64_t first, int64_t last) {
    (job->layer->bits == 4 ? run4 : job->layer->bits == 6 ? run6 : run8)(job, first, last);
}

const mx_integers mx_integers_avx512_vnni = {pack, product};
#endif
