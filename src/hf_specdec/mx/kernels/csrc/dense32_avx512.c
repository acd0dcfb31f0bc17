/* float32 weights by AVX-512. */
#if defined(__x86_64__)
#include <immintrin.h>

#define TARGET __attribute__((target("avx512f")))
#define RUN mx_run32_avx512
#define LANES 16
#define MOST 8
#define GROUPS 2
#define SPLAT(x) ((lanes)_mm512_set1_ps(x))
#define MULADD(a, b, c) ((lanes)_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(c)))
#include "dense32.h"
#endif
