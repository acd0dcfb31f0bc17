/* Tile products of Intel's AMX (amx.c). A tile of codes is, decoded, what the instruction takes: sixteen vectors, one for each pair of inputs. */
#ifndef HF_SPECDEC_MX_AMX_H
#define HF_SPECDEC_MX_AMX_H

#include "avx512.h"

/* By name, as not every compiler's own functions for tiles say that they read and write memory. */
#define TILE_CONFIG(at) __asm__ volatile("ldtilecfg %0" ::"m"(*(at)))
#define TILE_RELEASE() __asm__ volatile("tilerelease")
#define TILE_ZERO(t) __asm__ volatile("tilezero %%tmm" #t ::)
#define TILE_LOAD(t, at, stride) __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"(at), "r"((int64_t)(stride)) : "memory")
#define TILE_STORE(t, at, stride) __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(at), "r"((int64_t)(stride)) : "memory")
#define TILE_DOT_BYTES(sum, x, w) __asm__ volatile("tdpbssd %%tmm" #w ", %%tmm" #x ", %%tmm" #sum ::)
#define TILE_DOT(sum, x, w) __asm__ volatile("tdpbf16ps %%tmm" #w ", %%tmm" #x ", %%tmm" #sum ::)

typedef struct {
    uint8_t palette, start, none[14];
    uint16_t bytes[16]; /* of a row of each tile */
    uint8_t rows[16];
} tile_shapes;

#ifdef TILES_OF_BF16
#define TARGET512 "avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2,avx512bf16"
#define AMX __attribute__((target(TARGET512)))
STORE_ROW(TARGET512, BF16_WORDS)
DECODE_TWO(decode_two, TARGET512, SPLIT2_VBMI2, SPLIT7_VBMI2, BYTES_VBMI)

#define MOST 32 /* rows of x at once: two tiles */

/* Tiles 0 to 3: the sums of rows 0 .. 15 by two groups, and of rows 16 .. 31; 4 and 5: these rows of x; 6 and 7: the groups' weights. */
static void configure(int64_t rows) {
    tile_shapes tiles = {.palette = 1};
    for (int t = 0; t < 8; t++) {
        tiles.bytes[t] = 64;
        tiles.rows[t] = (uint8_t)(t > 5 || (rows > 16 && (t < 2 || t == 4)) ? 16 : t < 2 || t == 4 ? rows : rows > 16 ? rows - 16 : 1);
    }
    TILE_CONFIG(&tiles);
}

/* The sums of a block; with `fresh`, they begin at zero. x: the rows' inputs, `stride` bytes apart; w: the groups' weights. */
MX_INLINE void products(const void *x, int64_t stride, const uint8_t *const *w, const int groups, const int rows, const int fresh) {
    TILE_LOAD(4, x, stride);
    if (rows > 16) TILE_LOAD(5, (const char *)x + 16 * stride, stride);
    TILE_LOAD(6, w[0], 64);
    if (fresh) TILE_ZERO(0);
    TILE_DOT(0, 4, 6);
    if (groups > 1) {
        TILE_LOAD(7, w[1], 64);
        if (fresh) TILE_ZERO(1);
        TILE_DOT(1, 4, 7);
    }
    if (rows > 16) {
        if (fresh) TILE_ZERO(2);
        TILE_DOT(2, 5, 6);
        if (groups > 1) {
            if (fresh) TILE_ZERO(3);
            TILE_DOT(3, 5, 7);
        }
    }
}

#endif
#endif
