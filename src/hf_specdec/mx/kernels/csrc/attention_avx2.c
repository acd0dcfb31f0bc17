/* Attention by AVX2: what the wider paths take, too. */
#if defined(__x86_64__)
#include <immintrin.h>

#define TARGET __attribute__((target("avx2,f16c")))
#define RUN mx_attend_avx2
#define F16(words) ((v8)_mm256_cvtph_ps((__m128i)(words)))
#include "attention.h"
#endif
