/* float32 activations on ARM's NEON. */
#if defined(__aarch64__)
#include <arm_neon.h>

#define TARGET
#define RUN mx_run_neon
#define LANES 4
#define BOTH(x) ((lanes)vld1q_dup_f64((const double *)(const void *)(x)))
#define MULADD(a, b, c) ((lanes)vfmaq_f32((float32x4_t)(c), (float32x4_t)(a), (float32x4_t)(b)))
#define FROM_HALVES(w, to)                                              \
    to[0] = (lanes)vcvt_f32_f16(vget_low_f16((float16x8_t)(w)));        \
    to[1] = (lanes)vcvt_high_f32_f16((float16x8_t)(w))
#define ON_TOP(w, to)                                                   \
    to[0] = (lanes)vzip1q_u16(vdupq_n_u16(0), (uint16x8_t)(w)),         \
    to[1] = (lanes)vzip2q_u16(vdupq_n_u16(0), (uint16x8_t)(w))
#define ROWS(scales, s, on_top)                                                                             \
    for (int i = 0; i < PARTS && ((void)(on_top), 1); i += 2) {                                             \
        const uint8x16_t rows = vld1q_u8(scales);                                                           \
        const uint8x16_t twice = i < 4 ? vzip1q_u8(rows, rows) : vzip2q_u8(rows, rows);                     \
        const uint16x8_t e = i % 4 ? vmovl_high_u8(twice) : vmovl_u8(vget_low_u8(twice));                   \
        const uint32x4_t least = vdupq_n_u32(1u << 22);                                                     \
        s[i] = (lanes)vmaxq_u32(vshlq_n_u32(vmovl_u16(vget_low_u16(e)), 23), least);                        \
        s[i + 1] = (lanes)vmaxq_u32(vshlq_n_u32(vmovl_high_u16(e), 23), least);                             \
    }
#define PLACE(r, on_top) ((void)(on_top), 2 * (r)) /* in their order */
#include "pairs.h"
#endif
