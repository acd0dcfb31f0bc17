/* Attention by AVX2. */
#if defined(__x86_64__)
#include <immintrin.h>

#define TARGET __attribute__((target("avx2,fma,f16c")))
#define RUN mx_attend_avx2
#define LANES 8
#define QUERIES 4
#define WEIGHTS 2
#define ANY(lanes) _mm256_movemask_ps((__m256)(lanes))
#define FUSED(a, b, sum) ((vw)_mm256_fmadd_ps((__m256)(a), _mm256_set1_ps(b), (__m256)(sum)))
#define DOUBLES(eight) __builtin_convertvector(eight, v8d)
#define F16(words) ((v8)_mm256_cvtph_ps((__m128i)(words)))
#include "attention.h"
#endif
