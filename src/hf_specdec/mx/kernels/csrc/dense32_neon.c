/* float32 weights by ARM's NEON. */
#if defined(__aarch64__)
#include <arm_neon.h>

#define TARGET
#define RUN mx_run32_neon
#define LANES 4
#define MOST 4
#define GROUPS 1
#define SPLAT(x) ((lanes)vdupq_n_f32(x))
#define MULADD(a, b, c) ((lanes)vfmaq_f32((float32x4_t)(c), (float32x4_t)(a), (float32x4_t)(b)))
#include "dense32.h"
#endif
