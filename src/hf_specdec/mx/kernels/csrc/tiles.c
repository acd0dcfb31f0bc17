/* Between the stored order of codes (a row after a row, least significant bit first) and tiles; and quantisation. */
#include "mx.h"

#include <string.h>

uint16_t mx_to_f16(float value) {
    uint32_t bits = mx_bits(value), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (rest >= 0x477ff000) return (uint16_t)(sign | 0x7c00); /* 65520 and up round to infinity */
    if (rest < 0x38800000) { /* below 2^-14: counts of 2^-24; adding 0.5 makes them the low bits, rounded to even */
        float shifted = mx_from_bits(rest) + 0.5f;
        return (uint16_t)(sign | (mx_bits(shifted) - 0x3f000000));
    }
    return (uint16_t)(sign | ((rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13));
}

float mx_from_f16(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
    if (rest >= 0x7c00) return mx_from_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    if (rest < 0x400) return mx_from_bits(sign | mx_bits((float)rest * 0x1p-24f));
    return mx_from_bits(sign | ((rest << 13) + 0x38000000));
}

/* One of the 32 word columns of half a tile: the codes of eight vectors in bits / 2 words, `stride` words apart. */
MX_INLINE void pack_half(const uint16_t code[8], uint16_t *word, int stride, int bits) {
    if (bits == 4) {
        for (int j = 0; j < 2; j++)
            word[j * stride] = code[4 * j] | code[4 * j + 1] << 4 | code[4 * j + 2] << 8 | code[4 * j + 3] << 12;
    } else if (bits == 6) {
        word[0] = code[0] | code[1] << 6 | (code[2] & 15) << 12;
        word[stride] = code[3] | code[4] << 6 | (code[7] & 15) << 12;
        word[2 * stride] = code[5] | code[6] << 6 | (code[2] >> 4) << 12 | (code[7] >> 4) << 14;
    } else if (bits == 8) {
        for (int j = 0; j < 4; j++) word[j * stride] = code[2 * j] | code[2 * j + 1] << 8;
    } else {
        for (int j = 0; j < 8; j++) word[j * stride] = code[j];
    }
}

MX_INLINE void unpack_half(uint16_t code[8], const uint16_t *word, int stride, int bits) {
    if (bits == 4) {
        for (int j = 0; j < 8; j++) code[j] = word[j / 4 * stride] >> (j % 4 * 4) & 15;
    } else if (bits == 6) {
        uint16_t a = word[0], b = word[stride], c = word[2 * stride];
        code[0] = a & 63, code[1] = a >> 6 & 63, code[2] = a >> 12 | (c >> 8 & 0x30), code[3] = b & 63;
        code[4] = b >> 6 & 63, code[5] = c & 63, code[6] = c >> 6 & 63, code[7] = b >> 12 | (c >> 10 & 0x30);
    } else if (bits == 8) {
        for (int j = 0; j < 8; j++) code[j] = word[j / 2 * stride] >> (j % 2 * 8) & 255;
    } else {
        for (int j = 0; j < 8; j++) code[j] = word[j * stride];
    }
}

/* The 32 codes of one row and block, in the stored order. */
MX_INLINE void unpack_row(const uint8_t *p, uint16_t code[32], int bits) {
    if (bits == 4)
        for (int i = 0; i < 16; i++) code[2 * i] = p[i] & 15, code[2 * i + 1] = p[i] >> 4;
    else if (bits == 6)
        for (int i = 0; i < 8; i++, p += 3) {
            uint32_t word = p[0] | p[1] << 8 | p[2] << 16;
            for (int j = 0; j < 4; j++) code[4 * i + j] = word >> (6 * j) & 63;
        }
    else if (bits == 8)
        for (int i = 0; i < 32; i++) code[i] = p[i];
    else
        memcpy(code, p, 64);
}

MX_INLINE void pack_row(uint8_t *p, const uint16_t code[32], int bits) {
    if (bits == 4)
        for (int i = 0; i < 16; i++) p[i] = (uint8_t)(code[2 * i] | code[2 * i + 1] << 4);
    else if (bits == 6)
        for (int i = 0; i < 8; i++, p += 3) {
            uint32_t word = 0;
            for (int j = 0; j < 4; j++) word |= (uint32_t)code[4 * i + j] << (6 * j);
            p[0] = (uint8_t)word, p[1] = (uint8_t)(word >> 8), p[2] = (uint8_t)(word >> 16);
        }
    else if (bits == 8)
        for (int i = 0; i < 32; i++) p[i] = (uint8_t)code[i];
    else
        memcpy(p, code, 64);
}

void mx_pack_row(uint8_t *p, const uint16_t *code, int64_t k, int bits) {
    for (int64_t b = 0; b < k / MX_BLOCK; b++, p += MX_BLOCK * bits / 8, code += MX_BLOCK)
        if (bits == 4) pack_row(p, code, 4);
        else if (bits == 6) pack_row(p, code, 6);
        else pack_row(p, code, 8);
}

/* One tile from, or to, 16 stored rows that lie row_bytes apart. */
MX_INLINE void tile_rows(const uint8_t *rows, int64_t row_bytes, uint8_t *tile, int bits) {
    uint16_t code[MX_ROWS][MX_BLOCK], words[512];
    for (int r = 0; r < MX_ROWS; r++) unpack_row(rows + r * row_bytes, code[r], bits);
    for (int half = 0; half < 2; half++)
        for (int r = 0; r < MX_ROWS; r++)
            for (int parity = 0; parity < 2; parity++) {
                uint16_t column[8];
                for (int v = 0; v < 8; v++) column[v] = code[r][16 * half + 2 * v + parity];
                pack_half(column, words + half * 16 * bits + 2 * r + parity, 32, bits);
            }
    memcpy(tile, words, mx_tile_bytes(bits));
}

MX_INLINE void untile_rows(const uint8_t *tile, uint8_t *rows, int64_t row_bytes, int bits) {
    uint16_t code[MX_ROWS][MX_BLOCK], words[512];
    memcpy(words, tile, mx_tile_bytes(bits));
    for (int half = 0; half < 2; half++)
        for (int r = 0; r < MX_ROWS; r++)
            for (int parity = 0; parity < 2; parity++) {
                uint16_t column[8];
                unpack_half(column, words + half * 16 * bits + 2 * r + parity, 32, bits);
                for (int v = 0; v < 8; v++) code[r][16 * half + 2 * v + parity] = column[v];
            }
    for (int r = 0; r < MX_ROWS; r++) pack_row(rows + r * row_bytes, code[r], bits);
}

/* float32: [16 rows][32 inputs] and [32][16]. */
MX_INLINE void turn_rows(const uint8_t *from, uint8_t *to, int64_t row_bytes, int back) {
    for (int r = 0; r < MX_ROWS; r++)
        for (int i = 0; i < MX_BLOCK; i++) {
            const int64_t stored = r * row_bytes + 4 * i, tiled = 4 * (i * MX_ROWS + r);
            memcpy(to + (back ? stored : tiled), from + (back ? tiled : stored), 4);
        }
}

#define FOR_BITS(bits, CALL) \
    switch (bits) { case 4: CALL(4); break; case 6: CALL(6); break; case 8: CALL(8); break; default: CALL(16); }

/* n must be a multiple of 16. back = 0: stored to tiles; 1: tiles to stored. Source and destination must not overlap. */
void mx_tile(const uint8_t *codes, const uint8_t *scales, uint8_t *codes_out, uint8_t *scales_out, int64_t n, int64_t k,
             int bits, int back, int threads) {
    int64_t blocks = k / MX_BLOCK, block_bytes = MX_BLOCK * bits / 8, row_bytes = blocks * block_bytes;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t group = 0; group < n / MX_ROWS; group++) {
        int64_t at = group * MX_ROWS * row_bytes, scale_at = group * MX_ROWS * blocks;
        for (int64_t b = 0; b < blocks; b++) {
            int64_t stored = at + b * block_bytes, tiled = at + b * MX_ROWS * block_bytes;
#define TO(B) tile_rows(codes + stored, row_bytes, codes_out + tiled, B)
#define FROM(B) untile_rows(codes + tiled, codes_out + stored, row_bytes, B)
            if (bits == 32) {
                turn_rows(codes + (back ? tiled : stored), codes_out + (back ? stored : tiled), row_bytes, back);
            } else if (back) { FOR_BITS(bits, FROM) } else { FOR_BITS(bits, TO) }
            if (scales)
                for (int r = 0; r < MX_ROWS; r++) {
                    int64_t a = scale_at + r * blocks + b, c = scale_at + b * MX_ROWS + r;
                    if (back) scales_out[a] = scales[c]; else scales_out[c] = scales[a];
                }
        }
    }
}

/* The codes of one tile as float32 values before their scale, [32 inputs][16 rows]. */
void mx_tile_values(const uint8_t *tile, const float *values, int bits, float w[MX_BLOCK][MX_ROWS]) {
    uint16_t words[512];
    if (bits == 32) {
        memcpy(w, tile, mx_tile_bytes(bits));
        return;
    }
    memcpy(words, tile, mx_tile_bytes(bits));
    for (int half = 0; half < 2; half++)
        for (int lane = 0; lane < 32; lane++) {
            uint16_t column[8];
#define UNPACK(B) unpack_half(column, words + half * 16 * B + lane, 32, B)
            FOR_BITS(bits, UNPACK)
            for (int v = 0; v < 8; v++)
                w[16 * half + 2 * v + lane % 2][lane / 2] =
                    bits == 16 ? mx_from_bits((uint32_t)column[v] << 16) : values[column[v]];
        }
}
