/* float32 activations (float16 and bfloat16 ones are widened first) on AVX-512 F and BW: as avx512_bf16.c, with two fused
 * multiply-adds where that has one dot product. */
#if defined(__x86_64__)
#include "avx512.h"

#define TARGET_F "avx512f,avx512bw"
#define AHEAD 2048

DECODE_HALF(decode_half, TARGET_F, SPLIT2_BW, SPLIT7_BW, BYTES_BW)

/* Row groups first..last times rows m0 .. m0 + rows - 1 of x. */
MX_INLINE __attribute__((target(TARGET_F))) void multiply(const mx_job *job, int64_t first, int64_t last, int64_t m0,
                                                         const int rows, const int bits, const int integer) {
    const mx_layer *l = job->layer;
    const int64_t k = l->k, blocks = k / MX_BLOCK;
    const int half_bytes = 32 * bits;
    const mx_table table = mx_load_table(job);
    for (int64_t group = first; group < last; group++) {
        const uint8_t *codes = mx_group_codes(l, group), *scales = mx_group_scales(l, group);
        const float *x = (const float *)job->x + m0 * k;
        __m512 total[8];
        for (int m = 0; m < rows; m++) total[m] = _mm512_setzero_ps();
        for (int64_t b = 0; b < blocks; b++, codes += 2 * half_bytes, x += MX_BLOCK) {
            __m512 sum[8];
            for (int m = 0; m < rows; m++) sum[m] = _mm512_setzero_ps();
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                __m512i w[8];
                decode_half(codes + half * half_bytes, &table, w, bits, integer);
                for (int line = 0; line < half_bytes; line += 64)
                    _mm_prefetch((const char *)codes + half * half_bytes + line + AHEAD, _MM_HINT_T0);
#pragma GCC unroll 8
                for (int v = 0; v < 8; v++) {
                    __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(w[v], 16));
                    __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(w[v], _mm512_set1_epi32((int)0xffff0000)));
#pragma GCC unroll 8
                    for (int m = 0; m < rows; m++) {
                        const float *at = x + m * k + 16 * half + 2 * v;
                        sum[m] = _mm512_fmadd_ps(even, _mm512_set1_ps(at[0]), sum[m]);
                        sum[m] = _mm512_fmadd_ps(odd, _mm512_set1_ps(at[1]), sum[m]);
                    }
                }
            }
            if (bits == 16) {
                for (int m = 0; m < rows; m++) total[m] = _mm512_add_ps(total[m], sum[m]);
            } else {
                __m512 scale = mx_load_scales(scales + b * MX_ROWS);
                for (int m = 0; m < rows; m++) total[m] = _mm512_fmadd_ps(sum[m], scale, total[m]);
            }
        }
        int64_t left = l->n - group * MX_ROWS;
        for (int m = 0; m < rows; m++) {
            float values[MX_ROWS];
            _mm512_storeu_ps(values, total[m]);
            mx_store(job, m0 + m, group * MX_ROWS, values, left < MX_ROWS ? left : MX_ROWS);
        }
    }
}

#define ROWS(R) case R: multiply(job, group, group + 1, m0, R, bits, integer); break;

MX_INLINE __attribute__((target(TARGET_F))) void run(const mx_job *job, int64_t first, int64_t last, const int bits,
                                                    const int integer) {
    for (int64_t group = first; group < last; group++)
        for (int64_t m0 = 0; m0 < job->m; m0 += 4)
            switch (job->m - m0 < 4 ? job->m - m0 : 4) { ROWS(1) ROWS(2) ROWS(3) ROWS(4) }
}

BY_WIDTH(mx_run_avx512f, TARGET_F)
#endif
