/* Attention by AVX-512 with its products of pairs of bfloat16. */
#if defined(__x86_64__)
#include <immintrin.h>

#define TARGET __attribute__((target("avx512f,avx512vl,avx512dq,f16c,avx512bf16")))
#define RUN mx_attend_avx512_bf16
#define LANES 16
#define QUERIES 12
#define WEIGHTS 3
#define ANY(lanes) _mm512_movepi32_mask((__m512i)(lanes))
#define PAIR(sum, key, query) ((vw)_mm512_dpbf16_ps((__m512)(sum), (__m512bh)(key), (__m512bh)_mm512_set1_ps(query)))
#define FUSED(a, b, sum) ((vw)_mm512_fmadd_ps((__m512)(a), _mm512_set1_ps(b), (__m512)(sum)))
#define DOUBLES(eight) ((v8d)_mm512_cvtps_pd((__m256)(eight)))
#define HELD(x) __asm__("" : "+v"(x))
#define F16(words) ((v8)_mm256_cvtph_ps((__m128i)(words)))
#include "attention.h"
#endif
