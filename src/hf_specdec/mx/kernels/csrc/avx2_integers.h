/* Layers whose activations are rounded to MXINT8, 256 bits at a time (fours.h). Without VNNI, products of bytes are summed in pairs in 16 bits: of weights in 6 and
 * 4 bits, made positive, no such sum exceeds 16 bits (124 * 127 * 2; four times 28 * 127 * 2); those in 8 bits leave their sign to x (128 * 127 * 2). With it all
 * weights are made positive, and four products are summed at once. Included once per set of instructions, with
 *   TARGET                 the target attribute of every function
 *   AT_ONCE(bits)          as fours.h has it
 *   DOT(sum, w, x)         where there is VNNI: sum += the four products of each lane
 */
#include <immintrin.h>

#include "integers.h"

#define LANES 8
#define MOST_AT_ONCE 4
#define MULADD(a, b, c) ((lanes)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c)))
#define LOAD_SCALES(scales) \
    _mm256_max_epu32(_mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)(scales))), 23), _mm256_set1_epi32(1 << 22))

#ifdef DOT
MX_INLINE int offset_of(const mx_layer *l) { return mx_offset(l); }
#else
MX_INLINE int offset_of(const mx_layer *l) { return l->bits == 8 ? 0 : mx_offset(l); }
#endif

MX_INLINE TARGET uint32_t most_of(__m256i v) {
    __m128i m = _mm_max_epu32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0x4e));
    return (uint32_t)_mm_cvtsi128_si32(_mm_max_epu32(m, _mm_shuffle_epi32(m, 0xb1)));
}

MX_INLINE TARGET int32_t sum_of(__m256i v) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}

MX_INLINE TARGET __m256 load_x(const void *x, int64_t at, int dtype) {
    if (dtype == MX_DT_F32) return _mm256_loadu_ps((const float *)x + at);
    const __m128i words = _mm_loadu_si128((const __m128i *)(const void *)((const uint16_t *)x + at));
    if (dtype == MX_DT_F16) return _mm256_cvtph_ps(words);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
}

/* One chunk of x [m, k]. */
static TARGET void pack(const void *x, int dtype, int32_t *packed, int64_t chunk, int64_t m, const mx_layer *l) {
    const int64_t m0 = 8 * chunk, rows = m - m0 < 8 ? m - m0 : 8, blocks = l->k / MX_BLOCK;
    uint8_t order[MX_BLOCK];
    order_of(l->bits, order);
    const __m256i places = _mm256_loadu_si256((const __m256i *)(const void *)order), sides = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff), most = _mm256_set1_epi32(127), least = _mm256_set1_epi32(-127);
    const int offset = offset_of(l);
    const float unit = 0x1p-6f * mx_weight_unit(l);
    packed += m0 * blocks * WORDS;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t b = 0; b < blocks; b++) {
            __m256 v[4];
            __m256i whole[4], largest = _mm256_setzero_si256(), sum = _mm256_setzero_si256();
            for (int i = 0; i < 4; i++) {
                v[i] = load_x(x, (m0 + r) * l->k + b * MX_BLOCK + 8 * i, dtype);
                largest = _mm256_max_epu32(largest, _mm256_and_si256(_mm256_castps_si256(v[i]), magnitude));
            }
            const uint32_t amax = most_of(largest), byte = mx_integer_scale(amax);
            const int finite = amax < 0x7f800000, up = 6 + 127 - (int)byte; /* in two steps, as 2^133 is no float32 */
            const __m256 first = _mm256_set1_ps(mx_from_bits((uint32_t)(127 + up / 2) << 23));
            const __m256 second = _mm256_set1_ps(mx_from_bits((uint32_t)(127 + up - up / 2) << 23));
            for (int i = 0; i < 4; i++) {
                whole[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_mul_ps(v[i], first), second));
                whole[i] = finite ? _mm256_max_epi32(_mm256_min_epi32(whole[i], most), least) : _mm256_setzero_si256();
                sum = _mm256_add_epi32(sum, whole[i]);
            }
            const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(whole[0], whole[1]), _mm256_packs_epi32(whole[2], whole[3]));
            int32_t four[8], *to = packed + b * WORDS * rows + r;
            _mm256_storeu_si256((__m256i *)(void *)four, _mm256_shuffle_epi8(_mm256_permutevar8x32_epi32(bytes, sides), places));
            for (int i = 0; i < 8; i++) to[i * rows] = four[i];
            to[8 * rows] = -offset * sum_of(sum);
            to[9 * rows] = finite ? (int32_t)mx_bits(mx_scale((uint8_t)byte) * unit) : 0x7fc00000;
        }
}

typedef struct {
    __m256i small, large; /* what a code is worth, by its last four bits: of 4 bits, offset included; of 6, its magnitude, without bit 4 and with it */
} tables;

MX_INLINE TARGET tables load_tables(const mx_layer *l) {
    uint8_t value[2][16];
    for (int i = 0; i < 32; i++)
        value[i / 16][i % 16] = (uint8_t)(int)(l->values[i & ((1 << l->bits) - 1)] / mx_weight_unit(l) + (l->bits == 4 ? (float)mx_offset(l) : 0.0f));
#define TWICE(table) _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)(table)))
    return (tables){TWICE(value[0]), TWICE(value[1])};
}

MX_INLINE TARGET __m256i values_of(__m256i code, const tables *t, const int bits) {
#ifdef DOT
    if (bits == 8) return _mm256_xor_si256(code, _mm256_set1_epi8((char)0x80));
#else
    if (bits == 8) return code;
#endif
    if (bits == 4) return _mm256_shuffle_epi8(t->small, code);
    const __m256i bit4 = _mm256_slli_epi16(code, 3), sign = _mm256_slli_epi16(code, 2); /* on top of each byte; a sign of zero is that of code 0 */
    const __m256i magnitude = _mm256_blendv_epi8(_mm256_shuffle_epi8(t->small, code), _mm256_shuffle_epi8(t->large, code), bit4);
    return _mm256_add_epi8(_mm256_sign_epi8(magnitude, sign), _mm256_set1_epi8(64));
}

typedef __m256i held;
#define VALUES(code, t, bits) values_of((__m256i)(code), t, bits)
#ifdef DOT
#define FOUR(sum, rest, w, x, v, bits) \
    (void)rest;                        \
    sum = (whole)DOT((__m256i)(sum), (__m256i)(w), (__m256i)(x));
#else
MX_INLINE TARGET void four(__m256i *sum, __m256i *rest, __m256i w, __m256i x, const int v, const int bits) {
    const __m256i two = bits == 8 ? _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w)) : _mm256_maddubs_epi16(w, x);
    *rest = bits == 4 && v % 4 ? _mm256_add_epi16(*rest, two) : two;
    if (bits != 4 || v % 4 == 3) *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(*rest, _mm256_set1_epi16(1)));
    __asm__("" : "+x"(*rest), "+x"(*sum)); /* one after the other: compilers keep all products, and add them in a tree */
}
#define FOUR(sum, rest, w, x, v, bits)                  \
    __m256i s_ = (__m256i)(sum);                        \
    four(&s_, &(rest), (__m256i)(w), (__m256i)(x), v, bits); \
    sum = (whole)s_;
#endif
#include "fours.h"
