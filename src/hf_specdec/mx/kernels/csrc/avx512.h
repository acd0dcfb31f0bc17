/* Half a tile of codes to eight vectors of bfloat16 words, two at a time. Tables are looked up by permutation: 32, 64 or 2 x 64 entries. */
#ifndef HF_SPECDEC_MX_AVX512_H
#define HF_SPECDEC_MX_AVX512_H

#include <immintrin.h>

#include "mx.h"

typedef struct {
    __m512i part[4];
} mx_table;

#define LOAD(p, i) _mm512_loadu_si512((const void *)((p) + 64 * (i)))

MX_INLINE __attribute__((target("avx512f,avx512bw"))) mx_table mx_load_table(const mx_job *job) {
    mx_table table;
    for (int i = 0; i < 4; i++) table.part[i] = LOAD((const uint8_t *)job->table, i);
    return table;
}

/* The same as the high bytes of all entries, then their low bytes. */
MX_INLINE __attribute__((target("avx512f,avx512bw"))) mx_table mx_load_byte_table(const mx_job *job) {
    uint8_t bytes[2][128];
    for (int i = 0; i < 128; i++) bytes[0][i] = (uint8_t)(job->table[i] >> 8), bytes[1][i] = (uint8_t)job->table[i];
    mx_table table;
    for (int i = 0; i < 4; i++) table.part[i] = LOAD(bytes[0], i);
    return table;
}

/* vpermi2w reads six bits of each index and ignores the rest, so that codes need no masking. */
#define LOOK64(t, code, i) _mm512_permutex2var_epi16((t)->part[i], code, (t)->part[(i) + 1])

/* Two vectors of 8-bit codes in the bytes of one; `m` has their magnitudes. Without VBMI: 128 words in two tables, chosen by
 * bit 6; the sign goes from bit 7 to bit 15. */
#define LOOK128(t, magnitude, sign)                                                                                  \
    _mm512_ternarylogic_epi32(_mm512_mask_blend_epi16(_mm512_test_epi16_mask(magnitude, _mm512_set1_epi16(0x40)),     \
                                                      LOOK64(t, magnitude, 0), LOOK64(t, magnitude, 2)),              \
                              sign, _mm512_set1_epi16((short)0x8000), 0xF8)
#define BYTES_BW(t, a, m, w)                                                                                         \
    (w)[0] = LOOK128(t, m, _mm512_slli_epi16(a, 8));                                                                 \
    (w)[1] = LOOK128(t, _mm512_srli_epi16(m, 8), a);

/* With VBMI: all 64 high bytes and all 64 low bytes at once (tables of 128 bytes), then the two are put together. */
#define BYTES_VBMI(t, a, m, w)                                                                                       \
    __m512i high = _mm512_permutex2var_epi8((t)->part[0], m, (t)->part[1]);                                          \
    __m512i low = _mm512_permutex2var_epi8((t)->part[2], m, (t)->part[3]);                                           \
    high = _mm512_ternarylogic_epi32(high, a, _mm512_set1_epi8((char)0x80), 0xF8);                                   \
    (w)[0] = _mm512_ternarylogic_epi32(_mm512_slli_epi16(high, 8), low, _mm512_set1_epi16(0xff), 0xF8);              \
    (w)[1] = _mm512_ternarylogic_epi32(_mm512_srli_epi16(low, 8), high, _mm512_set1_epi16((short)0xff00), 0xF8);

/* The first and the second numbers of the pairs of bfloat16 numbers in a vector, in float32. */
typedef struct {
    __m512 first, second;
} mx_pairs;
#define MX_PAIRS(w) ((mx_pairs){_mm512_castsi512_ps(_mm512_slli_epi32(w, 16)), _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32((int)0xffff0000)))})

/* NAME: vectors 2j and 2j + 1 of the eight of the half tile at p. */
#define DECODE_TWO(NAME, TARGET, SPLIT2, SPLIT7, BYTES)                                                              \
    MX_INLINE __attribute__((target(TARGET))) void NAME(const uint8_t *p, const mx_table *t, __m512i w[2], const int j, \
                                                        const int bits, const int integer) {                         \
        if (bits == 4) {                                                                                             \
            const __m512i a = LOAD(p, j / 2);                                                                        \
            w[0] = _mm512_permutexvar_epi16(j % 2 ? _mm512_srli_epi16(a, 8) : a, t->part[0]);                        \
            w[1] = _mm512_permutexvar_epi16(j % 2 ? _mm512_srli_epi16(a, 12) : _mm512_srli_epi16(a, 4), t->part[0]); \
        } else if (bits == 6) {                                                                                      \
            const __m512i a = LOAD(p, 0), b = LOAD(p, 1), c = LOAD(p, 2);                                            \
            w[0] = LOOK64(t, j == 0 ? a : j == 1 ? SPLIT2(a, c) : j == 2 ? _mm512_srli_epi16(b, 6) : _mm512_srli_epi16(c, 6), 0); \
            w[1] = LOOK64(t, j == 0 ? _mm512_srli_epi16(a, 6) : j == 1 ? b : j == 2 ? c : SPLIT7(b, c), 0);          \
        } else if (bits == 8) {                                                                                      \
            const __m512i a = LOAD(p, j), m = integer ? _mm512_abs_epi8(a) : a;                                      \
            BYTES(t, a, m, w)                                                                                        \
        } else {                                                                                                     \
            w[0] = LOAD(p, 2 * j), w[1] = LOAD(p, 2 * j + 1);                                                        \
        }                                                                                                            \
    }

/* Codes 2 and 7 of a half are split over two words: four bits on top of one, two in the last one. */
#define SPLIT2_VBMI2(a, c) _mm512_shrdi_epi16(a, _mm512_srli_epi16(c, 12), 12)
#define SPLIT7_VBMI2(b, c) _mm512_shrdi_epi16(b, _mm512_srli_epi16(c, 14), 12)
#define SPLIT2_BW(a, c) \
    _mm512_ternarylogic_epi32(_mm512_srli_epi16(a, 12), _mm512_srli_epi16(c, 8), _mm512_set1_epi16(0x30), 0xF8)
#define SPLIT7_BW(b, c) \
    _mm512_ternarylogic_epi32(_mm512_srli_epi16(b, 12), _mm512_srli_epi16(c, 10), _mm512_set1_epi16(0x30), 0xF8)

#define AHEAD 2048 /* bytes of codes that are asked for in advance */

/* While block b of some row groups is multiplied: ask for the block of each that is AHEAD bytes further on, or, behind the last one, for those of
 * the groups that come next. */
MX_INLINE void ask_ahead(const uint8_t *const *codes, const int groups, int64_t b, int64_t blocks, const int tile_bytes) {
    const int64_t ahead = (AHEAD + tile_bytes - 1) / tile_bytes, to = b + ahead < blocks ? b + ahead : b + ahead + (groups - 1) * blocks;
    for (int g = 0; g < groups; g++)
        for (int line = 0; line < tile_bytes; line += 64) _mm_prefetch((const char *)codes[g] + to * tile_bytes + line, _MM_HINT_T0);
}

/* Ask for codes [from, to), which will be read in the second-level cache's time: the next group's or panel's, spread over the work on
 * this one, so that memory is read all the time. */
MX_INLINE void ask(const uint8_t *from, const uint8_t *to) {
    for (from = (const uint8_t *)((uintptr_t)from & ~(uintptr_t)63); from < to; from += 64) _mm_prefetch((const char *)from, _MM_HINT_T1);
}

/* 16 scale bytes to float32; byte 0 is 2^-127, whose bits are 1 << 22. */
MX_INLINE __attribute__((target("avx512f,avx512bw"))) __m512 mx_load_scales(const uint8_t *p) {
    __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm512_castsi512_ps(_mm512_max_epu32(_mm512_slli_epi32(bytes, 23), _mm512_set1_epi32(1 << 22)));
}

/* Sixteen numbers of this dtype, from number `at` on, to float32. */
MX_INLINE __attribute__((target("avx512f,avx512bw"))) __m512 mx_load_numbers(const void *x, int dtype, int64_t at) {
    if (dtype == MX_DT_F32) return _mm512_loadu_ps((const float *)x + at);
    const __m256i words = _mm256_loadu_si256((const __m256i *)((const uint16_t *)x + at));
    return dtype == MX_DT_F16 ? _mm512_cvtph_ps(words) : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
}

/* A row of results: the outputs of one group, plus their biases: store_row. TO_BF16: 16 numbers to 16 words. */
#define STORE_ROW(TARGET, TO_BF16)                                                                                                            \
    MX_INLINE __attribute__((target(TARGET))) void store_row(const mx_job *job, int64_t m, int64_t group, __m512 total) {                     \
        const mx_layer *l = job->layer;                                                                                                       \
        const int64_t first = group * MX_ROWS, left = l->n - first, at = m * l->n + first;                                                    \
        const __mmask16 mask = left >= MX_ROWS ? 0xffff : (__mmask16)((1 << left) - 1);                                                       \
        if (l->bias) total = _mm512_add_ps(total, _mm512_maskz_loadu_ps(mask, l->bias + first));                                              \
        if (job->out_dtype == MX_DT_BF16) _mm256_mask_storeu_epi16((uint16_t *)job->out + at, mask, TO_BF16(total));                          \
        else if (job->out_dtype == MX_DT_F16)                                                                                                 \
            _mm256_mask_storeu_epi16((uint16_t *)job->out + at, mask, _mm512_cvtps_ph(total, _MM_FROUND_TO_NEAREST_INT));                     \
        else _mm512_mask_storeu_ps((float *)job->out + at, mask, total);                                                                      \
    }

/* By the processor's own instruction, and without it: to nearest, ties to even; a nan stays one. */
#define BF16_WORDS(v) (__m256i)_mm512_cvtneps_pbh(v)
MX_INLINE __attribute__((target("avx512f,avx512bw,avx512vl"))) __m256i bf16_words(__m512 v) {
    const __m512i bits = _mm512_castps_si512(v), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_blend_epi32(_mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), rounded, quiet), 16));
}

/* NAME, a function of its own for each width of code: `run` is inlined with that width as a constant. */
#define FOR_WIDTH(NAME, TARGET, BITS, INTEGER)                                                                       \
    static __attribute__((target(TARGET), noinline)) void NAME(const mx_job *job, int64_t first, int64_t last) {     \
        run(job, first, last, BITS, INTEGER);                                                                        \
    }
#define BY_WIDTH(NAME, TARGET)                                                                                       \
    FOR_WIDTH(bits4, TARGET, 4, 0)                                                                                   \
    FOR_WIDTH(bits6, TARGET, 6, 0)                                                                                   \
    FOR_WIDTH(bits8, TARGET, 8, 0)                                                                                   \
    FOR_WIDTH(integers, TARGET, 8, 1)                                                                                \
    FOR_WIDTH(dense, TARGET, 16, 0)                                                                                  \
    void NAME(const mx_job *job, int64_t first, int64_t last) {                                                      \
        const mx_layer *l = job->layer;                                                                              \
        const mx_run f = l->bits == 4 ? bits4 : l->bits == 6 ? bits6 : l->bits == 16 ? dense                         \
                         : l->format == MX_INT8 ? integers : bits8;                                                  \
        f(job, first, last);                                                                                         \
    }
#endif
