/* Layers whose activations are rounded to MXINT8, on AVX2: what avx512_vnni.c computes, bit for bit, with products of bytes that are summed in pairs
 * in 16 bits. Of weights in 6 and 4 bits, made positive, no such sum exceeds 16 bits (124 * 127 * 2; four times 28 * 127 * 2); those in 8 bits leave
 * their sign to x (128 * 127 * 2). A few rows take the weights from registers, more from the first-level cache, where a block is decoded
 * once for all of them. */
#if defined(__x86_64__)
#include <immintrin.h>

#include "integers.h"

#define TARGET __attribute__((target("avx2,fma,f16c")))
#define SIDES 2    /* vectors of 8 rows */
#define VECTORS 8  /* of a tile and side: four inputs each */
#define FEW 3      /* rows of x for which a block is not written down */
#define AT_ONCE 4  /* rows of x that share a load of weights, at most */
#define MOST 64    /* rows of x that share a decoded block: whole chunks */
#define AHEAD 2048 /* bytes of codes that are asked for in advance */

MX_INLINE int offset_of(const mx_layer *l) { return l->bits == 8 ? 0 : mx_offset(l); }

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
TARGET void mx_pack_integers_avx2(const void *x, int dtype, int32_t *packed, int64_t chunk, int64_t m, const mx_layer *l) {
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

/* Vector v of the four of half a tile, 8 rows of it, as bytes: of 4 and 6 bits positive ones. */
MX_INLINE TARGET __m256i decode(const uint8_t *half, const tables *t, const int v, const int bits) {
#define LOAD(i) _mm256_loadu_si256((const __m256i *)(const void *)(half + 64 * (i)))
#define MASKED(words, mask) _mm256_and_si256(words, _mm256_set1_epi16(mask))
    if (bits == 8) return LOAD(v);
    if (bits == 4) return _mm256_shuffle_epi8(t->small, MASKED(v % 2 ? _mm256_srli_epi16(LOAD(v / 2), 4) : LOAD(v / 2), 0x0f0f));
    __m256i code;
    if (v < 3) {
        code = _mm256_or_si256(MASKED(LOAD(v), 0x003f), MASKED(_mm256_slli_epi16(LOAD(v), 2), 0x3f00));
    } else {
        const __m256i low = _mm256_or_si256(_mm256_srli_epi16(LOAD(0), 12), MASKED(_mm256_srli_epi16(LOAD(1), 4), 0x0f00));
        const __m256i high = _mm256_or_si256(MASKED(_mm256_srli_epi16(LOAD(2), 8), 0x0030), MASKED(_mm256_srli_epi16(LOAD(2), 2), 0x3000));
        code = _mm256_or_si256(low, high);
    }
    const __m256i bit4 = _mm256_slli_epi16(code, 3), sign = _mm256_slli_epi16(code, 2); /* on top of each byte; a sign of zero is that of code 0 */
    const __m256i magnitude = _mm256_blendv_epi8(_mm256_shuffle_epi8(t->small, code), _mm256_shuffle_epi8(t->large, code), bit4);
    return _mm256_add_epi8(_mm256_sign_epi8(magnitude, sign), _mm256_set1_epi8(64));
}

MX_INLINE TARGET __m256 load_scales(const uint8_t *scales) {
    const __m256i e = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)scales));
    return _mm256_castsi256_ps(_mm256_max_epu32(_mm256_slli_epi32(e, 23), _mm256_set1_epi32(1 << 22)));
}

/* total[row] += a block times its 32 inputs of `rows` rows of a chunk of `chunk` rows. The weights come from `tile`, or, without one, from the codes. One
 * row's result is made by the same operations in the same order whatever the number of rows. */
MX_INLINE TARGET void multiply(const __m256i (*tile)[SIDES], const uint8_t *codes, const uint8_t *scales, const tables *t, const int32_t *x, int64_t chunk,
                               __m256 (*total)[SIDES], const int rows, const int bits) {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i sum[AT_ONCE][SIDES], held[AT_ONCE][SIDES];
#pragma GCC unroll 4
    for (int m = 0; m < rows; m++)
        for (int s = 0; s < SIDES; s++) sum[m][s] = _mm256_set1_epi32(x[8 * chunk + m]);
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) {
        __m256i w[SIDES];
        for (int s = 0; s < SIDES; s++) w[s] = tile ? tile[v][s] : decode(codes + v / 4 * 32 * bits + 32 * s, t, v % 4, bits);
#pragma GCC unroll 4
        for (int m = 0; m < rows; m++) {
            const __m256i four = _mm256_set1_epi32(x[v * chunk + m]);
            for (int s = 0; s < SIDES; s++) {
                const __m256i two = bits == 8 ? _mm256_maddubs_epi16(_mm256_abs_epi8(w[s]), _mm256_sign_epi8(four, w[s])) : _mm256_maddubs_epi16(w[s], four);
                held[m][s] = bits == 4 && v % 4 ? _mm256_add_epi16(held[m][s], two) : two;
                if (bits != 4 || v % 4 == 3) sum[m][s] = _mm256_add_epi32(sum[m][s], _mm256_madd_epi16(held[m][s], ones));
                __asm__("" : "+x"(held[m][s]), "+x"(sum[m][s])); /* one after the other: compilers keep all products, and add them in a tree */
            }
        }
    }
#pragma GCC unroll 4
    for (int m = 0; m < rows; m++)
        for (int s = 0; s < SIDES; s++) {
            const __m256 scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(sum[m][s]), load_scales(scales + 8 * s));
            total[m][s] = _mm256_fmadd_ps(scaled, _mm256_castsi256_ps(_mm256_set1_epi32(x[9 * chunk + m])), total[m][s]);
        }
}

MX_INLINE TARGET void run(const mx_job *job, int64_t first, int64_t last, const int bits) {
    const mx_layer *l = job->layer;
    const int64_t blocks = l->k / MX_BLOCK, at_once = bits == 6 ? AT_ONCE : 3; /* as many as registers hold the sums of */
    const tables t = load_tables(l);
    __m256 total[MOST][SIDES];
    __m256i tile[VECTORS][SIDES];
    for (int64_t group = first; group < last; group++)
        for (int64_t m0 = 0; m0 < job->m; m0 += MOST) {
            const uint8_t *codes = mx_group_codes(l, group), *scales = mx_group_scales(l, group);
            const int64_t rows = job->m - m0 < MOST ? job->m - m0 : MOST;
            for (int64_t m = 0; m < rows; m++) total[m][0] = total[m][1] = _mm256_setzero_ps();
            for (int64_t b = 0; b < blocks; b++, codes += 64 * bits, scales += MX_ROWS) {
                for (int line = 0; line < 64 * bits; line += 64) _mm_prefetch((const char *)codes + line + AHEAD, _MM_HINT_T0);
                const int32_t *x = (const int32_t *)job->x + m0 * blocks * WORDS;
#define DIRECT(R) case R: multiply(NULL, codes, scales, &t, x + b * R * WORDS, R, total, R, bits); continue;
                switch (rows) { DIRECT(1) DIRECT(2) DIRECT(FEW) }
#pragma GCC unroll 8
                for (int v = 0; v < VECTORS; v++)
                    for (int s = 0; s < SIDES; s++) tile[v][s] = decode(codes + v / 4 * 32 * bits + 32 * s, &t, v % 4, bits);
                for (int64_t m = 0; m < rows; m += 8) {
                    const int64_t chunk = rows - m < 8 ? rows - m : 8;
                    const int32_t *own = x + (m * blocks + b * chunk) * WORDS;
                    for (int64_t i = 0; i < chunk; i += at_once)
#define CASE(R) case R: multiply(tile, NULL, scales, &t, own + i, chunk, total + m + i, R, bits); break;
                        switch (chunk - i < at_once ? chunk - i : at_once) { CASE(1) CASE(2) CASE(3) CASE(AT_ONCE) }
                }
            }
            for (int64_t m = 0; m < rows; m++) {
                const int64_t left = l->n - group * MX_ROWS;
                mx_store(job, m0 + m, group * MX_ROWS, (const float *)total[m], left < MX_ROWS ? left : MX_ROWS);
            }
        }
}

#define FOR_BITS(BITS) \
    static TARGET __attribute__((noinline)) void run##BITS(const mx_job *job, int64_t first, int64_t last) { run(job, first, last, BITS); }
FOR_BITS(4) FOR_BITS(6) FOR_BITS(8)

void mx_run_avx2_integers(const mx_job *job, int64_t first, int64_t last) {
    (job->layer->bits == 4 ? run4 : job->layer->bits == 6 ? run6 : run8)(job, first, last);
}
#endif
