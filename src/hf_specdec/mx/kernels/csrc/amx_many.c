/* Many rows of x by tiles: stretches of several row groups are decoded once, into the second-level cache, with their scales, so that sums stay in tiles. As scales are
 * powers of two, a row gets the bits that amx.c gives it, unless a product of its numbers might be too small or too large for that: such rows are left to amx.c. */
#include "mx.h"

#ifdef MX_AMX_KNOWN
#include <stdlib.h>

#define TILES_OF_BF16
#include "amx.h"

#define PANEL 18 /* blocks, at most: with as many of 32 rows of x, in the first-level cache */
#define FAR 60   /* a scale of more than 2^60, or less than 2^-60: rows are left to amx.c */

/* The largest distance of a scale of these groups from 1, in binary places. */
static AMX int farthest(const mx_layer *l, int64_t group, int groups) {
    __m128i low = _mm_set1_epi8((char)0xff), high = _mm_setzero_si128();
    for (int g = 0; g < groups; g++)
        for (int64_t b = 0; b < l->k / MX_BLOCK; b++) {
            const __m128i scales = _mm_loadu_si128((const __m128i *)(mx_group_scales(l, group + g) + b * MX_ROWS));
            low = _mm_min_epu8(low, scales), high = _mm_max_epu8(high, scales);
        }
    uint8_t least[16], most[16];
    _mm_storeu_si128((__m128i *)least, low), _mm_storeu_si128((__m128i *)most, high);
    int far = 0;
    for (int i = 0; i < 16; i++) far = 127 - least[i] > far ? 127 - least[i] : most[i] - 127 > far ? most[i] - 127 : far;
    return far;
}

/* Whether no sum of these rows leaves what float32 holds exactly with a scale or without: codes are worth 2^-18 or a multiple of it, and at most 2^16; numbers have eight
 * significant bits. */
static int within(const mx_job *job, int64_t m0, int64_t rows, int far) {
    const uint8_t *range = (const uint8_t *)((const uint16_t *)job->x + job->m * job->layer->k);
    int inside = far <= FAR;
    for (int64_t chunk = m0 / 8; chunk <= (m0 + rows - 1) / 8; chunk++) inside &= range[2 * chunk] >= 26 + far && range[2 * chunk + 1] <= 190 - far;
    return inside;
}

/* w[block][pair]: `count` blocks of a group from block b0 on, times their scales. */
MX_INLINE AMX void decode(const mx_layer *l, const mx_table *table, int64_t group, int64_t b0, int64_t count, __m512i (*w)[16], const int bits, const int integer) {
    const uint8_t *codes = mx_group_codes(l, group) + b0 * 64 * bits, *scales = mx_group_scales(l, group) + b0 * MX_ROWS;
    for (int64_t b = 0; b < count; b++, codes += 64 * bits, scales += MX_ROWS) {
        const __m512i places = _mm512_slli_epi32(_mm512_sub_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)scales)), _mm512_set1_epi32(127)), 23);
        const __m512i shift = _mm512_or_si512(places, _mm512_srli_epi32(places, 16)); /* in both numbers' exponents */
        for (int half = 0; half < 2; half++)
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
                __m512i two[2];
                decode_two(codes + half * 32 * bits, table, two, j, bits, integer);
#pragma GCC unroll 2
                for (int i = 0; i < 2; i++)
                    w[b][8 * half + 2 * j + i] = _mm512_mask_add_epi16(two[i], _mm512_test_epi16_mask(two[i], _mm512_set1_epi16(0x7fff)), two[i], shift);
            }
    }
}

/* totals[row][group], `stride` bytes a row, of one or two groups += `count` blocks of x, `block` numbers apart, times w, `apart` bytes from group to group. With `fresh`, they
 * begin at zero. */
MX_INLINE void add(const uint16_t *x, int64_t block, const uint8_t *w, int64_t apart, int64_t count, float *totals, int64_t stride, const int groups, const int rows,
                   const int fresh) {
    char *low = (char *)(totals + 16 * stride / 4);
    if (fresh) {
        TILE_ZERO(0);
        if (groups > 1) TILE_ZERO(1);
        if (rows > 16) TILE_ZERO(2);
        if (rows > 16 && groups > 1) TILE_ZERO(3);
    } else {
        TILE_LOAD(0, totals, stride);
        if (groups > 1) TILE_LOAD(1, totals + MX_ROWS, stride);
        if (rows > 16) TILE_LOAD(2, low, stride);
        if (rows > 16 && groups > 1) TILE_LOAD(3, low + 64, stride);
    }
    for (int64_t b = 0; b < count; b++, x += block, w += 1024) {
        const uint8_t *both[2] = {w, w + apart};
        products(x, 2 * MX_BLOCK, both, groups, rows, 0);
    }
    TILE_STORE(0, totals, stride);
    if (groups > 1) TILE_STORE(1, totals + MX_ROWS, stride);
    if (rows > 16) TILE_STORE(2, low, stride);
    if (rows > 16 && groups > 1) TILE_STORE(3, low + 64, stride);
}

/* At most MX_AMX_GROUPS row groups times all rows of x. */
MX_INLINE AMX void multiply(const mx_job *job, int64_t group, const int groups, float *totals, __m512i (*decoded)[PANEL][16], const int bits, const int integer) {
    const mx_layer *l = job->layer;
    const int64_t blocks = l->k / MX_BLOCK, stride = 64 * groups, m = job->m;
    const mx_table table = bits == 8 ? mx_load_byte_table(job) : mx_load_table(job);
    const int far = bits < 16 ? farthest(l, group, groups) : 0;
    const int64_t panels = (blocks + PANEL - 1) / PANEL;
    for (int64_t p = 0, b0 = 0, count, configured = 0; p < panels; p++, b0 += count) {
        count = (blocks - b0) / (panels - p);
        for (int g = 0; bits < 16 && far <= FAR && g < groups; g++) decode(l, &table, group + g, b0, count, decoded[g], bits, integer);
        for (int64_t m0 = 0, rows; m0 < m; m0 += rows) {
            rows = m - m0 < MOST ? m - m0 : MOST;
            if (bits < 16 && !within(job, m0, rows, far)) continue;
            if (rows != configured) configure(configured = rows);
            const uint16_t *x = (const uint16_t *)job->x + m0 * l->k + b0 * rows * MX_BLOCK;
            float *sums = totals + (panels > 1 ? m0 * stride / 4 : 0);
            for (int g = 0, some; g < groups; g += some) {
                const uint8_t *w = bits < 16 ? (const uint8_t *)decoded[g] : mx_group_codes(l, group + g) + b0 * 1024;
                const int64_t apart = bits < 16 ? (int64_t)sizeof *decoded : blocks * 1024;
                float *at = sums + g * MX_ROWS;
                some = groups - g > 1 && (bits < 16 || group + g + 1 < l->n / MX_ROWS) ? 2 : 1; /* the last one may lie elsewhere */
                if (some == 2 && rows > 16) add(x, rows * MX_BLOCK, w, apart, count, at, stride, 2, 32, !p);
                else if (some == 2) add(x, rows * MX_BLOCK, w, apart, count, at, stride, 2, 16, !p);
                else if (rows > 16) add(x, rows * MX_BLOCK, w, apart, count, at, stride, 1, 32, !p);
                else add(x, rows * MX_BLOCK, w, apart, count, at, stride, 1, 16, !p);
            }
            for (int64_t r = 0; p + 1 == panels && r < rows; r++)
                for (int g = 0; g < groups; g++) store_row(job, m0 + r, group + g, _mm512_load_ps(sums + (r * groups + g) * MX_ROWS));
        }
    }
    TILE_RELEASE();
    for (int64_t m0 = 0, rows; m0 < m; m0 += rows) {
        rows = m - m0 < MOST ? m - m0 : MOST;
        if (bits == 16 || within(job, m0, rows, far)) continue;
        mx_job these = *job;
        these.x = (const uint16_t *)job->x + m0 * l->k, these.m = rows;
        these.out = (char *)job->out + m0 * l->n * (job->out_dtype == MX_DT_F32 ? 4 : 2);
        mx_run_amx(&these, group, group + groups);
    }
}

MX_INLINE AMX void run(const mx_job *job, int64_t group, int64_t last, const int bits, const int integer) {
    float *totals = aligned_alloc(64, (size_t)(job->m * MX_AMX_GROUPS * 64));
    __m512i(*decoded)[PANEL][16] = aligned_alloc(64, (size_t)MX_AMX_GROUPS * sizeof *decoded);
    if (!totals || !decoded) mx_run_amx(job, group, last); /* which needs no memory */
    else
        for (int groups; group < last; group += groups) {
            groups = last - group < MX_AMX_GROUPS ? (int)(last - group) : MX_AMX_GROUPS;
            multiply(job, group, groups, totals, decoded, bits, integer);
        }
    free(totals), free(decoded);
}

BY_WIDTH(mx_run_amx_many, TARGET512)
#endif
