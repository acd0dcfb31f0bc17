/* float32 activations (float16 and bfloat16 ones are widened first) on AVX-512 F and BW: as avx512_bf16.c, with two fused
 * multiply-adds where that has one dot product. */
#if defined(__x86_64__)
#include "avx512.h"

#define TARGET_F "avx512f,avx512bw"
#define F512 __attribute__((target(TARGET_F)))

DECODE_TWO(decode_two, TARGET_F, SPLIT2_BW, SPLIT7_BW, BYTES_BW)

/* The first and the second of the pairs of bfloat16 numbers in a vector. */
#define EVEN(w) _mm512_castsi512_ps(_mm512_slli_epi32(w, 16))
#define ODD(w) _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32((int)0xffff0000)))

/* Row groups group .. group + groups - 1 times rows m0 .. m0 + rows - 1 of x: together eight chains of sums where there are that many, so that
 * the multipliers need not wait. */
MX_INLINE F512 void multiply(const mx_job *job, int64_t group, int64_t m0, const int groups, const int rows, const int bits, const int integer) {
    const mx_layer *l = job->layer;
    const int64_t k = l->k, blocks = k / MX_BLOCK;
    const int half_bytes = 32 * bits;
    const mx_table table = mx_load_table(job);
    const float *x = (const float *)job->x + m0 * k;
    const uint8_t *codes[4], *scales[4];
    for (int g = 0; g < groups; g++) codes[g] = mx_group_codes(l, group + g), scales[g] = mx_group_scales(l, group + g);
    __m512 total[4][4];
    for (int g = 0; g < groups; g++)
        for (int m = 0; m < rows; m++) total[g][m] = _mm512_setzero_ps();
    for (int64_t b = 0; b < blocks; b++, x += MX_BLOCK) {
        ask_ahead(codes, groups, b, blocks, 2 * half_bytes);
        __m512 sum[4][4];
        for (int g = 0; g < groups; g++)
            for (int m = 0; m < rows; m++) sum[g][m] = _mm512_setzero_ps();
        for (int half = 0; half < 2; half++)
#pragma GCC unroll 4
        for (int two = 0; two < 4; two++) {
            __m512i w[4][2];
#pragma GCC unroll 4
            for (int g = 0; g < groups; g++) decode_two(codes[g] + (2 * b + half) * half_bytes, &table, w[g], two, bits, integer);
#pragma GCC unroll 2
            for (int i = 0; i < 2; i++)
#pragma GCC unroll 4
                for (int m = 0; m < rows; m++) {
                    const float *at = x + m * k + 16 * half + 4 * two + 2 * i;
                    const __m512 first = _mm512_set1_ps(at[0]), second = _mm512_set1_ps(at[1]);
#pragma GCC unroll 4
                    for (int g = 0; g < groups; g++) sum[g][m] = _mm512_fmadd_ps(EVEN(w[g][i]), first, sum[g][m]);
#pragma GCC unroll 4
                    for (int g = 0; g < groups; g++) sum[g][m] = _mm512_fmadd_ps(ODD(w[g][i]), second, sum[g][m]);
                }
        }
        for (int g = 0; g < groups; g++) {
            const __m512 scale = bits == 16 ? _mm512_setzero_ps() : mx_load_scales(scales[g] + b * MX_ROWS);
            for (int m = 0; m < rows; m++)
                total[g][m] = bits == 16 ? _mm512_add_ps(total[g][m], sum[g][m]) : _mm512_fmadd_ps(sum[g][m], scale, total[g][m]);
        }
    }
    for (int g = 0; g < groups; g++) {
        const int64_t first = (group + g) * MX_ROWS, left = l->n - first;
        for (int m = 0; m < rows; m++) {
            float values[MX_ROWS];
            _mm512_storeu_ps(values, total[g][m]);
            mx_store(job, m0 + m, first, values, left < MX_ROWS ? left : MX_ROWS);
        }
    }
}

#define AT(G, R) case R: multiply(job, group, m0, G, R, bits, integer); break;

MX_INLINE F512 void run(const mx_job *job, int64_t group, int64_t last, const int bits, const int integer) {
    for (int groups; group < last; group += groups) {
        groups = bits > 4 && job->m <= 2 ? 1 : job->m == 2 && group + 4 <= last ? 4 : group + 2 <= last ? 2 : 1; /* from one place memory is read faster */
        for (int64_t m0 = 0; m0 < job->m; m0 += 4) {
            const int64_t rows = job->m - m0 < 4 ? job->m - m0 : 4;
            if (groups == 4) switch (rows) { AT(4, 2) }
            else if (groups == 2) switch (rows) { AT(2, 1) AT(2, 2) AT(2, 3) AT(2, 4) }
            else switch (rows) { AT(1, 1) AT(1, 2) AT(1, 3) AT(1, 4) }
        }
    }
}

BY_WIDTH(mx_run_avx512f, TARGET_F)
#endif
