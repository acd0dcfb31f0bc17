/* Rounded activations by AVX-VNNI, which processors without AVX-512 have, too. */
#include "mx.h"

#ifdef MX_AVX_VNNI
#define TARGET __attribute__((target("avx2,fma,f16c,avxvnni")))
#define AT_ONCE(bits) 4
#define DOT _mm256_dpbusd_avx_epi32
#include "avx2_integers.h"

const mx_integers mx_integers_avx2_vnni = {pack, product};
#endif
