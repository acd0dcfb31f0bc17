/* Attention by AVX-512. */
#if defined(__x86_64__)
#include <immintrin.h>

#define TARGET __attribute__((target("avx512f,avx512vl,avx512dq,f16c")))
#define RUN mx_attend_avx512
#define LANES 16
#define QUERIES 4
#define F16(words) ((v8)_mm256_cvtph_ps((__m128i)(words)))
#include "attention.h"
#endif
