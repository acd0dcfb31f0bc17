/* Layers whose activations are rounded to MXINT8, by the dot products of ARM v8.2 (fours.h), which leave weights their sign: nothing has to be offset. */
#if defined(__aarch64__)
#include <arm_neon.h>

#include "integers.h"

#ifdef __ARM_FEATURE_DOTPROD
#define TARGET
#else
#define TARGET __attribute__((target("arch=armv8.2-a+dotprod")))
#endif
#define LANES 4
#define MOST_AT_ONCE 4
#define AT_ONCE(bits) 4
#define MULADD(a, b, c) ((lanes)vfmaq_f32((float32x4_t)(c), (float32x4_t)(a), (float32x4_t)(b)))

MX_INLINE float32x4_t load_x(const void *x, int64_t at, int dtype) {
    if (dtype == MX_DT_F32) return vld1q_f32((const float *)x + at);
    const uint16x4_t words = vld1_u16((const uint16_t *)x + at);
    return dtype == MX_DT_F16 ? vcvt_f32_f16(vreinterpret_f16_u16(words)) : vreinterpretq_f32_u32(vshll_n_u16(words, 16));
}

/* One chunk of x [m, k]. */
static void pack(const void *x, int dtype, int32_t *packed, int64_t chunk, int64_t m, const mx_layer *l) {
    const int64_t m0 = 8 * chunk, rows = m - m0 < 8 ? m - m0 : 8, blocks = l->k / MX_BLOCK;
    uint8_t order[MX_BLOCK];
    order_of(l->bits, order);
    const float unit = 0x1p-6f * mx_weight_unit(l);
    packed += m0 * blocks * WORDS;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t b = 0; b < blocks; b++) {
            float32x4_t v[8];
            uint32x4_t largest = vdupq_n_u32(0);
            int8_t bytes[MX_BLOCK];
            for (int i = 0; i < 8; i++) {
                v[i] = load_x(x, (m0 + r) * l->k + b * MX_BLOCK + 4 * i, dtype);
                largest = vmaxq_u32(largest, vandq_u32(vreinterpretq_u32_f32(v[i]), vdupq_n_u32(0x7fffffff)));
            }
            const uint32_t amax = vmaxvq_u32(largest), byte = mx_integer_scale(amax);
            const int finite = amax < 0x7f800000, up = 6 + 127 - (int)byte; /* in two steps, as 2^133 is no float32 */
            const float first = mx_from_bits((uint32_t)(127 + up / 2) << 23), second = mx_from_bits((uint32_t)(127 + up - up / 2) << 23);
            for (int i = 0; i < 8; i++) {
                const int32x4_t whole = vcvtnq_s32_f32(vmulq_n_f32(vmulq_n_f32(v[i], first), second));
                const int32x4_t own = vmaxq_s32(vminq_s32(whole, vdupq_n_s32(127)), vdupq_n_s32(-127));
                for (int j = 0; j < 4; j++) bytes[4 * i + j] = finite ? (int8_t)own[j] : 0;
            }
            int32_t *to = packed + b * WORDS * rows + r;
            for (int i = 0; i < 8; i++) {
                int8_t four[4];
                for (int j = 0; j < 4; j++) four[j] = bytes[order[4 * i + j]];
                __builtin_memcpy(to + i * rows, four, 4);
            }
            to[8 * rows] = 0;
            to[9 * rows] = finite ? (int32_t)mx_bits(mx_scale((uint8_t)byte) * unit) : 0x7fc00000;
        }
}

typedef struct {
    int8x16x4_t value; /* of every code of 4 or 6 bits */
} tables;

MX_INLINE tables load_tables(const mx_layer *l) {
    int8_t value[64];
    for (int i = 0; i < 64; i++) value[i] = (int8_t)(l->values[i & ((1 << l->bits) - 1)] / mx_weight_unit(l));
    return (tables){{{vld1q_s8(value), vld1q_s8(value + 16), vld1q_s8(value + 32), vld1q_s8(value + 48)}}};
}

MX_INLINE int8x16_t values_of(uint8x16_t code, const tables *t, const int bits) {
    return bits == 8 ? vreinterpretq_s8_u8(code) : bits == 4 ? vqtbl1q_s8(t->value.val[0], code) : vqtbl4q_s8(t->value, code);
}

typedef char held; /* nothing */
MX_INLINE uint32x4_t four_scales(const uint8_t *at) {
    uint32_t four;
    __builtin_memcpy(&four, at, 4);
    return vmaxq_u32(vshlq_n_u32(vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four)))), 23), vdupq_n_u32(1u << 22));
}
#define LOAD_SCALES(scales) four_scales(scales)
#define VALUES(code, t, bits) values_of((uint8x16_t)(code), t, bits)
#define FOUR(sum, rest, w, x, v, bits) \
    (void)rest;                        \
    sum = (whole)vdotq_s32((int32x4_t)(sum), (int8x16_t)(w), (int8x16_t)(x));
#include "fours.h"

const mx_integers mx_integers_neon = {pack, product};
#endif
