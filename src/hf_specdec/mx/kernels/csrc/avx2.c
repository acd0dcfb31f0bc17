/* float32 activations (16-bit ones are widened first) on AVX2, FMA and F16C. A code goes to the places of a float16 (whose subnormals make its
 * own exact) and is widened; two inputs that lie side by side are multiplied as a pair, and the two sums of a pair are added at the end of a
 * row group. One or two rows of x take the weights from registers, more from the first-level cache, where a block is decoded once for all of them. */
#if defined(__x86_64__)
#include <immintrin.h>

#include "mx.h"

#define TARGET __attribute__((target("avx2,fma,f16c")))
#define PARTS 4     /* vectors of a pair of inputs: 16 rows, two numbers each */
#define PAIRS (MX_BLOCK / 2)
#define AT_ONCE 2   /* rows of x that share a load of weights: enough sums at once that no product waits for the one before */
#define MOST 64     /* rows of x that share a decoded block */
#define AHEAD 2048  /* bytes of codes that are asked for in advance */

typedef struct {
    __m256 part[PARTS];
} vectors;

/* Vector v of the eight of half a tile, 8 rows of it (see pack_half in tiles.c): 16 words that begin with their code, whatever follows. */
MX_INLINE TARGET __m256i code_first(const uint8_t *half, const int v, const int bits) {
#define WORDS(i) _mm256_loadu_si256((const __m256i *)(const void *)(half + 64 * (i)))
    if (bits == 4) return _mm256_slli_epi16(WORDS(v / 4), 12 - v % 4 * 4);
    if (bits == 8) return v % 2 ? WORDS(v / 2) : _mm256_slli_epi16(WORDS(v / 2), 8);
    if (bits == 16) return WORDS(v);
    const __m256i top = _mm256_set1_epi16((short)0xc000);
    if (v == 2) return _mm256_or_si256(_mm256_srli_epi16(WORDS(0), 2), _mm256_and_si256(_mm256_slli_epi16(WORDS(2), 2), top));
    if (v == 7) return _mm256_or_si256(_mm256_srli_epi16(WORDS(1), 2), _mm256_and_si256(WORDS(2), top));
    return _mm256_slli_epi16(WORDS(v / 3 + (v == 5)), v == 1 || v == 4 || v == 6 ? 4 : 10);
}

/* What `widen` leaves out: a power of two that makes up for the difference of the two exponent biases. */
MX_INLINE float missing_factor(const int format) {
    switch (format) {
        case MX_E4M3: return 0x1p8f;
        case MX_E3M2: return 0x1p12f;
        case MX_E2M3: case MX_E2M1: return 0x1p14f;
        case MX_INT8: return 0x1p-30f;
        default: return 1.0f;
    }
}

/* The words' numbers over `missing_factor`: rows 0..3 and 4..7, or, where words are spread within lanes, 0, 1, 4, 5 and 2, 3, 6, 7. */
#define SPREAD(format) ((format) == MX_INT8 || (format) == MX_BF16)
MX_INLINE TARGET void widen(__m256i w, __m256 f[2], const int format) {
    if (SPREAD(format)) {
        const __m256i zero = _mm256_setzero_si256();
        if (format == MX_INT8) w = _mm256_and_si256(w, _mm256_set1_epi16((short)0xff00));
        const __m256i low = _mm256_unpacklo_epi16(zero, w), high = _mm256_unpackhi_epi16(zero, w);
        f[0] = format == MX_INT8 ? _mm256_cvtepi32_ps(low) : _mm256_castsi256_ps(low);
        f[1] = format == MX_INT8 ? _mm256_cvtepi32_ps(high) : _mm256_castsi256_ps(high);
        return;
    }
    const int down = format == MX_E5M2 ? 0 : format == MX_E4M3 ? 1 : format == MX_E3M2 ? 2 : 3;
    const int bits = format == MX_E2M1 ? 4 : format == MX_E2M3 || format == MX_E3M2 ? 6 : 8;
    const int mask = 0x8000 | (((1 << (bits - 1)) - 1) << (16 - bits - down));
    const __m256i half = _mm256_and_si256(_mm256_srai_epi16(w, down), _mm256_set1_epi16((short)mask));
    f[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(half));
    f[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1));
}

MX_INLINE TARGET vectors decode(const uint8_t *codes, const int pair, const int format, const int bits) {
    vectors w;
    for (int side = 0; side < 2; side++)
        widen(code_first(codes + pair / 8 * 32 * bits + 32 * side, pair % 8, bits), w.part + 2 * side, format);
    return w;
}

/* The scales of a block's 16 rows times `missing_factor`, as `decode` has the rows. Scale bytes of 0 are 2^-127. */
MX_INLINE TARGET vectors load_scales(const uint8_t *scales, const int format) {
    const __m256i order[2] = {SPREAD(format) ? _mm256_setr_epi32(0, 0, 1, 1, 4, 4, 5, 5) : _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3),
                              SPREAD(format) ? _mm256_setr_epi32(2, 2, 3, 3, 6, 6, 7, 7) : _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7)};
    vectors s;
    for (int part = 0; part < PARTS; part++) {
        const __m256i e = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)(scales + part / 2 * 8)));
        const __m256 scale = _mm256_castsi256_ps(_mm256_max_epu32(_mm256_slli_epi32(e, 23), _mm256_set1_epi32(1 << 22)));
        s.part[part] = _mm256_permutevar8x32_ps(scale, order[part % 2]);
    }
    return s;
}

/* total[row] += a block times its 32 inputs of `rows` rows of x. The weights come from `tile`, or, without one, from the codes. One row's result
 * is made by the same operations in the same order whatever the number of rows. */
MX_INLINE TARGET void multiply(const vectors *tile, const uint8_t *codes, const uint8_t *scales, const float *x, vectors *total, const int rows,
                               const int format, const int bits) {
    vectors sum[AT_ONCE];
#pragma GCC unroll 2
    for (int m = 0; m < rows; m++)
        for (int i = 0; i < PARTS; i++) sum[m].part[i] = _mm256_setzero_ps();
#define PAIR(W)                                                                                                           \
    const vectors w = W;                                                                                                  \
    _Pragma("GCC unroll 2") for (int m = 0; m < rows; m++) {                                                              \
        const __m256 both = _mm256_castpd_ps(_mm256_broadcast_sd((const double *)(const void *)(x + m * MX_BLOCK + 2 * pair))); \
        for (int i = 0; i < PARTS; i++) sum[m].part[i] = _mm256_fmadd_ps(w.part[i], both, sum[m].part[i]);                \
    }
    if (tile) {
#pragma GCC unroll 2
        for (int pair = 0; pair < PAIRS; pair++) { PAIR(tile[pair]) }
    } else {
#pragma GCC unroll 16
        for (int pair = 0; pair < PAIRS; pair++) { PAIR(decode(codes, pair, format, bits)) }
    }
    const vectors scale = format == MX_BF16 ? (vectors){0} : load_scales(scales, format);
    const __m256 factor = _mm256_set1_ps(missing_factor(format));
#pragma GCC unroll 2
    for (int m = 0; m < rows; m++)
        for (int i = 0; i < PARTS; i++)
            total[m].part[i] = format == MX_BF16 ? _mm256_add_ps(total[m].part[i], sum[m].part[i])
                                                 : _mm256_fmadd_ps(_mm256_mul_ps(sum[m].part[i], factor), scale.part[i], total[m].part[i]);
}

/* The two sums of every pair, and the rows in their order. */
MX_INLINE TARGET void store(const mx_job *job, int64_t group, int64_t m, const vectors *total, const int format) {
    const int64_t left = job->layer->n - group * MX_ROWS;
    float pairs[2 * MX_ROWS], values[MX_ROWS];
    for (int i = 0; i < PARTS; i++) _mm256_storeu_ps(pairs + 8 * i, total->part[i]);
    for (int r = 0; r < MX_ROWS; r++) {
        const int at = SPREAD(format) ? r / 8 * 16 + r / 2 % 2 * 8 + r / 4 % 2 * 4 + r % 2 * 2 : 2 * r;
        values[r] = pairs[at] + pairs[at + 1];
    }
    mx_store(job, m, group * MX_ROWS, values, left < MX_ROWS ? left : MX_ROWS);
}

MX_INLINE TARGET void ask_ahead(const uint8_t *codes, const int bits) {
    for (int line = 0; line < 64 * bits; line += 64) _mm_prefetch((const char *)codes + line + AHEAD, _MM_HINT_T0);
}

/* A row group times one or two rows of x. */
MX_INLINE TARGET void few_rows(const mx_job *job, int64_t group, int64_t m0, const int rows, const int format, const int bits) {
    const mx_layer *l = job->layer;
    const uint8_t *codes = mx_group_codes(l, group), *scales = mx_group_scales(l, group);
    const float *x = (const float *)job->x + m0 * MX_BLOCK;
    vectors total[AT_ONCE] = {{{{0}}}};
    for (int64_t b = 0; b < l->k / MX_BLOCK; b++, codes += 64 * bits, scales += MX_ROWS, x += job->x_block) {
        ask_ahead(codes, bits);
        multiply(NULL, codes, scales, x, total, rows, format, bits);
    }
    for (int m = 0; m < rows; m++) store(job, group, m0 + m, total + m, format);
}

/* A row group times at most MOST rows of x. */
MX_INLINE TARGET void many_rows(const mx_job *job, int64_t group, int64_t m0, int64_t rows, const int format, const int bits) {
    const mx_layer *l = job->layer;
    const uint8_t *codes = mx_group_codes(l, group), *scales = mx_group_scales(l, group);
    const float *x = (const float *)job->x + m0 * MX_BLOCK;
    vectors total[MOST], tile[PAIRS];
    for (int64_t m = 0; m < rows; m++) total[m] = (vectors){0};
    for (int64_t b = 0; b < l->k / MX_BLOCK; b++, codes += 64 * bits, scales += MX_ROWS, x += job->x_block) {
        ask_ahead(codes, bits);
#pragma GCC unroll 16
        for (int pair = 0; pair < PAIRS; pair++) tile[pair] = decode(codes, pair, format, bits);
        int64_t m = 0;
        for (; m + AT_ONCE <= rows; m += AT_ONCE) multiply(tile, codes, scales, x + m * MX_BLOCK, total + m, AT_ONCE, format, bits);
        if (m < rows) multiply(tile, codes, scales, x + m * MX_BLOCK, total + m, 1, format, bits);
    }
    for (int64_t m = 0; m < rows; m++) store(job, group, m0 + m, total + m, format);
}

MX_INLINE TARGET void run(const mx_job *job, int64_t first, int64_t last, const int format, const int bits) {
    for (int64_t group = first; group < last; group++)
        for (int64_t m0 = 0; m0 < job->m; m0 += MOST) {
            const int64_t rows = job->m - m0 < MOST ? job->m - m0 : MOST;
            if (rows == 1) few_rows(job, group, m0, 1, format, bits);
            else if (rows == AT_ONCE) few_rows(job, group, m0, AT_ONCE, format, bits);
            else many_rows(job, group, m0, rows, format, bits);
        }
}

#define FORMAT(F, BITS) case F: run(job, first, last, F, BITS); break;

TARGET void mx_run_avx2(const mx_job *job, int64_t first, int64_t last) {
    switch (job->layer->format) {
        FORMAT(MX_E4M3, 8) FORMAT(MX_E5M2, 8) FORMAT(MX_E3M2, 6) FORMAT(MX_E2M3, 6) FORMAT(MX_E2M1, 4) FORMAT(MX_INT8, 8)
        FORMAT(MX_BF16, 16)
    }
}
#endif
