/* Layers whose activations are rounded to MXINT8, by the byte products of AMX, from three rows of x on; fewer go to avx512_vnni.c. Sums are exact, and what becomes of them is the
 * same, and so are the bits. Weights are signed bytes, which need no offset; those of MXINT8 lie in memory as a tile takes them. */
#include "mx.h"

#ifdef MX_AMX_KNOWN
#include "amx.h"
#include "vnni512.h"

#define FEW 2     /* rows, of which a tile would be nearly empty */
#define CHUNK 16  /* rows of a tile */
#define GROUPS 16 /* that all rows take in turn, while the second-level cache has them */

/* x, as it is packed: chunks of CHUNK rows (the last one may be shorter); of a chunk values[block][row][32], then scales[block][row]. */
typedef struct {
    int8_t *values;
    int32_t *scales;
    int64_t rows;
} chunk_of_x;

MX_INLINE chunk_of_x chunk_at(const void *packed, int64_t m0, int64_t m, int64_t blocks) {
    const int64_t rows = m - m0 < CHUNK ? m - m0 : CHUNK;
    int8_t *values = (int8_t *)packed + m0 * blocks * 4 * WORDS;
    return (chunk_of_x){values, (int32_t *)(void *)(values + rows * blocks * MX_BLOCK), rows};
}

/* Eight rows of x. */
static VNNI void pack(const void *x, int dtype, int32_t *packed, int64_t eight, int64_t m, const mx_layer *l) {
    if (m <= FEW) {
        mx_integers_avx512_vnni.pack(x, dtype, packed, eight, m, l);
        return;
    }
    const int64_t blocks = l->k / MX_BLOCK, m0 = 8 * eight / CHUNK * CHUNK, first = 8 * eight - m0;
    const chunk_of_x to = chunk_at(packed, m0, m, blocks);
    const __m256i places = places_of(l);
    const float unit = mx_weight_unit(l);
    for (int64_t r = first; r < to.rows && r < first + 8; r++)
        for (int64_t b = 0; b < blocks; b++) {
            const rounded block = round_block(x, dtype, (m0 + r) * l->k + b * MX_BLOCK, places, unit);
            _mm256_storeu_si256((__m256i *)(to.values + (b * to.rows + r) * MX_BLOCK), block.bytes);
            to.scales[b * to.rows + r] = block.scale;
        }
}

/* Tiles 0 and 1: the sums of two groups; 2: rows of x; 3 and 4: weights. */
static void configure(int64_t rows) {
    tile_shapes tiles = {.palette = 1};
    for (int t = 0; t < 5; t++) tiles.bytes[t] = t == 2 ? MX_BLOCK : 64, tiles.rows[t] = (uint8_t)(t < 3 ? rows : 8);
    TILE_CONFIG(&tiles);
}

/* Row groups group .. group + groups - 1 times the chunk of x that begins with row m0, of at most `rows` rows. */
MX_INLINE VNNI void multiply(const mx_job *job, int64_t group, int64_t m0, const int groups, const int rows, const int bits) {
    const mx_layer *l = job->layer;
    const int64_t blocks = l->k / MX_BLOCK;
    const int tile_bytes = 64 * bits;
    const tables t = load_tables(l, 0);
    const chunk_of_x x = chunk_at(job->x, m0, job->m, blocks);
    const uint8_t *codes[2], *scales[2];
    for (int g = 0; g < groups; g++) codes[g] = mx_group_codes(l, group + g), scales[g] = mx_group_scales(l, group + g);
    __m512i decoded[2][2][8], sums[2][2][CHUNK];
    __m512 total[CHUNK][2], scale[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int m = 0; m < rows; m++)
        for (int g = 0; g < groups; g++) total[m][g] = _mm512_setzero_ps(), sums[0][g][m] = sums[1][g][m] = _mm512_setzero_si512();
    int32_t of_x[CHUNK] = {0};
#define ADD(SLOT)                                               \
    _Pragma("GCC unroll 16") for (int m = 0; m < rows; m++)     \
        _Pragma("GCC unroll 2") for (int g = 0; g < groups; g++) total[m][g] = ADD_BLOCK(total[m][g], sums[SLOT][g][m], scale[g], of_x[m]);
    for (int64_t b = 0; b < blocks; b++) {
        const int slot = b & 1;
        const uint8_t *w[2];
        ask_ahead(codes, groups, b, blocks, tile_bytes);
#pragma GCC unroll 2
        for (int g = 0; g < groups; g++) {
            w[g] = bits == 8 ? codes[g] + b * tile_bytes : (const uint8_t *)decoded[slot][g];
#pragma GCC unroll 8
            for (int v = 0; bits < 8 && v < 8; v++) decoded[slot][g][v] = decode_one(codes[g] + b * tile_bytes + v / 4 * tile_bytes / 2, &t, v % 4, bits);
        }
        TILE_LOAD(2, x.values + b * x.rows * MX_BLOCK, MX_BLOCK);
        TILE_LOAD(3, w[0], 64);
        TILE_ZERO(0);
        TILE_DOT_BYTES(0, 2, 3);
        TILE_STORE(0, sums[slot][0], 64);
        if (groups > 1) {
            TILE_LOAD(4, w[1], 64);
            TILE_ZERO(1);
            TILE_DOT_BYTES(1, 2, 4);
            TILE_STORE(1, sums[slot][1], 64);
        }
        if (b) { ADD(!slot) } /* the block before's, which are there by now */
#pragma GCC unroll 2
        for (int g = 0; g < groups; g++) scale[g] = mx_load_scales(scales[g] + b * MX_ROWS);
        for (int64_t m = 0; m < x.rows; m++) of_x[m] = x.scales[b * x.rows + m];
    }
    ADD((blocks - 1) & 1)
    for (int g = 0; g < groups; g++)
        for (int m = 0; m < rows; m++)
            if (m < x.rows) store_row(job, m0 + m, group + g, total[m][g]);
}

MX_INLINE VNNI void run(const mx_job *job, int64_t group, int64_t last, const int bits) {
    int64_t configured = 0;
    for (int64_t end; group < last; group = end) {
        end = last - group < GROUPS ? last : group + GROUPS;
        for (int64_t m0 = 0; m0 < job->m; m0 += CHUNK) {
            const int64_t rows = job->m - m0 < CHUNK ? job->m - m0 : CHUNK;
            if (rows != configured) configure(configured = rows);
            for (int64_t at = group; at < end; at += rows <= 8 && end - at > 1 ? 2 : 1) {
                const int two = end - at > 1;
                if (rows > 8) multiply(job, at, m0, 1, 16, bits);
                else if (rows > 4) two ? multiply(job, at, m0, 2, 8, bits) : multiply(job, at, m0, 1, 8, bits);
                else two ? multiply(job, at, m0, 2, 4, bits) : multiply(job, at, m0, 1, 4, bits);
            }
        }
    }
    TILE_RELEASE();
}

static VNNI __attribute__((noinline)) void run4(const mx_job *job, int64_t first, int64_t last) { run(job, first, last, 4); }
static VNNI __attribute__((noinline)) void run6(const mx_job *job, int64_t first, int64_t last) { run(job, first, last, 6); }
static VNNI __attribute__((noinline)) void run8(const mx_job *job, int64_t first, int64_t last) { run(job, first, last, 8); }

static void product(const mx_job *job, int64_t first, int64_t last) {
    if (job->m <= FEW) mx_integers_avx512_vnni.product(job, first, last);
    else (job->layer->bits == 4 ? run4 : job->layer->bits == 6 ? run6 : run8)(job, first, last);
}

const mx_integers mx_integers_amx = {pack, product};
#endif
