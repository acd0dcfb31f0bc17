/* Rounded activations by AVX-512 VNNI, on processors that lack what avx512_vnni.c needs. */
#if defined(__x86_64__)
#define TARGET __attribute__((target("avx2,fma,f16c,avx512f,avx512vl,avx512vnni")))
#define AT_ONCE(bits) 4
#define DOT _mm256_dpbusd_epi32
#include "avx2_integers.h"

const mx_integers mx_integers_avx512vl_vnni = {pack, product};
#endif
