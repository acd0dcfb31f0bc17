/* Attention by ARM's NEON. */
#if defined(__aarch64__)
#include <arm_neon.h>

#define TARGET
#define RUN mx_attend_neon
#define LANES 4
#define QUERIES 6
#define WEIGHTS 3
#define ANY(lanes) vmaxvq_u32((uint32x4_t)(lanes))
#define FUSED(a, b, sum) ((vw)vfmaq_n_f32((float32x4_t)(sum), (float32x4_t)(a), b))
#define DOUBLES(eight) __builtin_convertvector(eight, v8d)
#define F16(words) halves(words)

#include "mx.h"

typedef float eight __attribute__((vector_size(32), aligned(4)));
MX_INLINE eight halves(uint16x8_t words) {
    const float32x4_t f[2] = {vcvt_f32_f16(vget_low_f16((float16x8_t)words)), vcvt_high_f32_f16((float16x8_t)words)};
    eight all;
    __builtin_memcpy(&all, f, sizeof all);
    return all;
}
#include "attention.h"
#endif
