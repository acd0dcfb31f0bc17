/* Rounded activations on AVX2, without VNNI. */
#if defined(__x86_64__)
#define TARGET __attribute__((target("avx2,fma,f16c")))
#define AT_ONCE(bits) ((bits) == 6 ? 4 : 3)
#include "avx2_integers.h"

const mx_integers mx_integers_avx2 = {pack, product};
#endif
