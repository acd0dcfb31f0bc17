/* bfloat16 activations by tiles: up to 32 rows of x times the weights of two tiles, as soon as these are decoded. One row's result is made by the same operations in
 * the same order whatever the number of rows: per block of 32, the products with the first inputs of sixteen pairs, and those with the second ones, each into a
 * fresh sum; then (first + second) * scale into the total. */
#include "mx.h"

#ifdef MX_AMX_KNOWN
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#define TILES_OF_BF16
#include "amx.h"

/* Products of bfloat16, or of bytes. Linux grants a process the memory for tiles if it asks; a processor without them, or an older kernel, does not. */
int mx_has_amx(int bytes) {
    enum { BF16 = 1 << 22, TILE = 1 << 24, INT8 = 1 << 25, MAY_ASK = 0x1023 /* ARCH_REQ_XCOMP_PERM */, TILES = 18 };
    static int known = -1; /* asking takes long on a virtual machine */
    unsigned a, b, c, d = 0;
    if (known < 0) known = __get_cpuid_count(7, 0, &a, &b, &c, &d) && d & TILE && !syscall(SYS_arch_prctl, MAY_ASK, TILES) ? (int)d : 0;
    return (known & (bytes ? INT8 : BF16)) != 0;
}

/* x [m, k] bfloat16: MOST rows (the last ones may be fewer) after MOST rows, and of these block after block. Behind it, for every eight rows, the exponents (as
 * stored) of their smallest and largest numbers that are neither zero nor infinite nor nan. This packs eight rows. */
__attribute__((target("avx2"))) void mx_pack_blocks(const void *x, void *packed, int64_t chunk, int64_t m, int64_t k) {
    uint16_t *to = packed;
    const __m256i none = _mm256_set1_epi16(0x7f80);
    __m256i least = none, most = _mm256_setzero_si256();
    const int64_t m0 = 8 * chunk / MOST * MOST, rows = m - m0 < MOST ? m - m0 : MOST;
    for (int64_t row = 8 * chunk; row < m && row < 8 * chunk + 8; row++)
        for (int64_t b = 0; b < k / MX_BLOCK; b++) {
            const uint16_t *from = (const uint16_t *)x + row * k + b * MX_BLOCK;
            __builtin_memcpy(to + m0 * k + (b * rows + row - m0) * MX_BLOCK, from, 2 * MX_BLOCK);
            const __m256i half[2] = {_mm256_loadu_si256((const __m256i *)from), _mm256_loadu_si256((const __m256i *)from + 1)};
            for (int i = 0; i < 2; i++) {
                const __m256i size = _mm256_and_si256(half[i], _mm256_set1_epi16(0x7fff)), finite = _mm256_cmpgt_epi16(none, size);
                least = _mm256_min_epu16(least, _mm256_or_si256(size, _mm256_and_si256(none, _mm256_cmpeq_epi16(size, _mm256_setzero_si256()))));
                most = _mm256_max_epu16(most, _mm256_and_si256(size, finite));
            }
        }
    uint16_t low[16], high[16], l = 0x7f80, h = 0;
    _mm256_storeu_si256((__m256i *)low, least), _mm256_storeu_si256((__m256i *)high, most);
    for (int i = 0; i < 16; i++) l = low[i] < l ? low[i] : l, h = high[i] > h ? high[i] : h;
    uint8_t *range = (uint8_t *)(to + m * k) + 2 * chunk;
    range[0] = (uint8_t)(l >> 7), range[1] = (uint8_t)(h >> 7);
}

/* The sums, to sums[group][row]. */
MX_INLINE void take_down(float (*sums)[MOST][MX_ROWS], const int groups, const int rows) {
    TILE_STORE(0, sums[0], 64);
    if (groups > 1) TILE_STORE(1, sums[1], 64);
    if (rows > 16) TILE_STORE(2, sums[0] + 16, 64);
    if (rows > 16 && groups > 1) TILE_STORE(3, sums[1] + 16, 64);
}

/* Row groups group .. group + groups - 1 times rows m0 .. m0 + rows - 1 of x, or fewer: `count`. */
MX_INLINE AMX void multiply(const mx_job *job, int64_t group, int64_t m0, int64_t count, const int groups, const int rows, const int bits, const int integer) {
    const mx_layer *l = job->layer;
    const int64_t blocks = l->k / MX_BLOCK;
    const int tile_bytes = 64 * bits;
    const mx_table table = bits == 8 ? mx_load_byte_table(job) : mx_load_table(job);
    const uint16_t *x = (const uint16_t *)job->x + m0 * l->k;
    const uint8_t *codes[2], *scales[2];
    for (int g = 0; g < groups; g++) codes[g] = mx_group_codes(l, group + g), scales[g] = mx_group_scales(l, group + g);
    __m512i decoded[2][2][MX_ROWS];
    float sums[2][2][MOST][MX_ROWS] __attribute__((aligned(64)));
    __m512 total[MOST][2], scale[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int m = 0; m < rows; m++)
        for (int g = 0; g < groups; g++) total[m][g] = _mm512_setzero_ps();
    for (int64_t m = count; bits < 16 && m < rows; m++) /* no tile writes these */
        for (int i = 0; i < 2 * groups; i++) _mm512_store_ps(sums[i & 1][i / 2][m], _mm512_setzero_ps());
#define ADD(SLOT)                                                                                                                \
    _Pragma("GCC unroll 2") for (int g = 0; g < groups; g++)                                                                     \
        _Pragma("GCC unroll 16") for (int m = 0; m < rows; m++) total[m][g] = _mm512_fmadd_ps(_mm512_load_ps(sums[SLOT][g][m]), scale[g], total[m][g]);
    for (int64_t b = 0; b < blocks; b++, x += count * MX_BLOCK) {
        const int slot = b & 1;
        const uint8_t *w[2];
        ask_ahead(codes, groups, b, blocks, tile_bytes);
#pragma GCC unroll 2
        for (int g = 0; g < groups; g++) {
            w[g] = bits == 16 ? codes[g] + b * tile_bytes : (const uint8_t *)decoded[slot][g];
            for (int half = 0; bits < 16 && half < 2; half++)
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++) {
                    __m512i two[2];
                    decode_two(codes[g] + b * tile_bytes + half * tile_bytes / 2, &table, two, j, bits, integer);
                    decoded[slot][g][8 * half + 2 * j] = two[0], decoded[slot][g][8 * half + 2 * j + 1] = two[1];
                }
        }
        products(x, 2 * MX_BLOCK, w, groups, rows, bits < 16 || !b);
        if (bits == 16) continue;
        take_down(sums[slot], groups, rows);
        if (b) { ADD(!slot) } /* the block before's, which are there by now */
#pragma GCC unroll 2
        for (int g = 0; g < groups; g++) scale[g] = mx_load_scales(scales[g] + b * MX_ROWS);
    }
    if (bits < 16) { ADD((blocks - 1) & 1) }
    if (bits == 16) take_down(sums[0], groups, rows);
    for (int g = 0; g < groups; g++)
        for (int m = 0; m < rows; m++)
            if (m < count) store_row(job, m0 + m, group + g, bits == 16 ? _mm512_load_ps(sums[0][g][m]) : total[m][g]);
}

#define AT(R) if (rows <= R) { if (groups == 2) multiply(job, group, m0, rows, 2, R, bits, integer); else multiply(job, group, m0, rows, 1, R, bits, integer); continue; }

MX_INLINE AMX void run(const mx_job *job, int64_t group, int64_t last, const int bits, const int integer) {
    int64_t configured = 0;
    for (int groups; group < last; group += groups) {
        groups = last - group > 1 ? 2 : 1;
        for (int64_t m0 = 0, rows; m0 < job->m; m0 += rows) {
            rows = job->m - m0 < MOST ? job->m - m0 : MOST;
            if (rows != configured) configure(configured = rows);
            AT(1) AT(2) AT(4) AT(8) AT(16) AT(32)
        }
    }
    TILE_RELEASE();
}

BY_WIDTH(mx_run_amx, TARGET512)
#endif
