/* Rounded activations on AVX-512 with VBMI: what packs a block of x, and what makes weights bytes. */
#ifndef HF_SPECDEC_MX_VNNI512_H
#define HF_SPECDEC_MX_VNNI512_H

#include "avx512.h"
#include "integers.h"

#define TARGET_VNNI "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vnni"
#define VNNI __attribute__((target(TARGET_VNNI)))
STORE_ROW(TARGET_VNNI, bf16_words)

typedef struct {
    __m256i bytes; /* in the order of order_of */
    int32_t sum, scale; /* of the bytes; the scale's bits, the weights' unit included */
} rounded;

MX_INLINE VNNI __m256i places_of(const mx_layer *l) {
    uint8_t order[MX_BLOCK];
    order_of(l->bits, order);
    return _mm256_loadu_si256((const __m256i *)order);
}

/* The block of x that begins with number `at`. */
MX_INLINE VNNI rounded round_block(const void *x, int dtype, int64_t at, const __m256i places, float unit) {
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff), most = _mm512_set1_epi32(127), least = _mm512_set1_epi32(-127);
    __m512 v[2];
    for (int i = 0; i < 2; i++) v[i] = mx_load_numbers(x, dtype, at + 16 * i);
    const uint32_t amax = _mm512_reduce_max_epu32(_mm512_max_epu32(_mm512_and_si512(_mm512_castps_si512(v[0]), magnitude),
                                                                  _mm512_and_si512(_mm512_castps_si512(v[1]), magnitude)));
    const int finite = amax < 0x7f800000;
    const uint32_t byte = mx_integer_scale(amax);
    __m512i whole[2];
    for (int i = 0; i < 2; i++) {
        whole[i] = _mm512_cvtps_epi32(_mm512_scalef_ps(v[i], _mm512_set1_ps((float)(6 + 127 - (int)byte))));
        whole[i] = finite ? _mm512_max_epi32(_mm512_min_epi32(whole[i], most), least) : _mm512_setzero_si512();
    }
    return (rounded){_mm256_permutexvar_epi8(places, _mm256_set_m128i(_mm512_cvtepi32_epi8(whole[1]), _mm512_cvtepi32_epi8(whole[0]))),
                     _mm512_reduce_add_epi32(_mm512_add_epi32(whole[0], whole[1])),
                     finite ? (int32_t)mx_bits(mx_scale((uint8_t)byte) * 0x1p-6f * unit) : 0x7fc00000};
}

typedef struct {
    __m512i values, low, high; /* what each code is worth, plus `offset`; the places of two codes in a word, of the upper bits of split ones */
} tables;

MX_INLINE VNNI tables load_tables(const mx_layer *l, const int offset) {
    uint8_t value[64], low[64], high[64];
    for (int i = 0; i < 64; i++) {
        value[i] = (uint8_t)((int)(l->values[i & ((1 << l->bits) - 1)] / mx_weight_unit(l)) + offset);
        low[i] = (uint8_t)(i % 8 / 2 * 16 + i % 2 * 6);
        high[i] = (uint8_t)(i % 8 / 2 * 16 + 8 + i % 2 * 2);
    }
    return (tables){LOAD(value, 0), LOAD(low, 0), LOAD(high, 0)};
}

/* Vector v of the four of half a tile, as bytes: unsigned ones, as `t` has been loaded, and so those of 8 bits. Lookups read six bits of each byte and ignore the rest. */
MX_INLINE VNNI __m512i decode_one(const uint8_t *p, const tables *t, const int v, const int bits) {
    if (bits == 4) return _mm512_permutexvar_epi8(v % 2 ? _mm512_srli_epi16(LOAD(p, v / 2), 4) : LOAD(p, v / 2), t->values);
    if (bits == 8) return _mm512_xor_si512(LOAD(p, v), _mm512_set1_epi8((char)0x80));
    if (v < 3) return _mm512_permutexvar_epi8(_mm512_multishift_epi64_epi8(t->low, LOAD(p, v)), t->values);
    const __m512i four = _mm512_ternarylogic_epi32(_mm512_srli_epi16(LOAD(p, 0), 12), _mm512_srli_epi16(LOAD(p, 1), 4), _mm512_set1_epi16(0x0f00), 0xF8);
    return _mm512_permutexvar_epi8(
        _mm512_ternarylogic_epi32(_mm512_set1_epi8(0x30), _mm512_multishift_epi64_epi8(t->high, LOAD(p, 2)), four, 0xCA), t->values);
}

/* total + sum * the weights' scale * the scale of x */
#define ADD_BLOCK(total, sum, scale, of_x) \
    _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(sum), scale), _mm512_castsi512_ps(_mm512_set1_epi32(of_x)), total)
#endif
