/* float32 weights by AVX2 and FMA. */
#if defined(__x86_64__)
#include <immintrin.h>

#define TARGET __attribute__((target("avx2,fma")))
#define RUN mx_run32_avx2
#define LANES 8
#define MOST 4
#define GROUPS 1
#define SPLAT(x) ((lanes)_mm256_set1_ps(x))
#define MULADD(a, b, c) ((lanes)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c)))
#include "dense32.h"
#endif
