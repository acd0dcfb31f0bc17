/* Attention by AVX2. */
#if defined(__x86_64__)
#include <immintrin.h>

#define TARGET __attribute__((target("avx2,f16c")))
#define RUN mx_attend_avx2
#define LANES 8
#define QUERIES 4
#define F16(words) ((v8)_mm256_cvtph_ps((__m128i)(words)))
#include "attention.h"
#endif
