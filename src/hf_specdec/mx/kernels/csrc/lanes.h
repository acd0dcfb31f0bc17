/* Numbers eight at a time: what attention reads and the functions it takes of them; with TARGET and F16 as in attention.h. The same bits
 * under every set of instructions. */
#include "turn.h"

typedef float v8 __attribute__((vector_size(32), aligned(4)));
typedef int32_t v8i __attribute__((vector_size(32), aligned(4)));
typedef uint16_t v8h __attribute__((vector_size(16), aligned(2)));

#define SPLAT(x) ((v8){x, x, x, x, x, x, x, x})

/* Eight numbers of dtype from element `at` on; the last ones of a head may be fewer: the missing ones are zeros. */
MX_INLINE TARGET v8 load8(const void *base, int64_t at, int64_t count, const int dtype) {
    if (dtype == MX_DT_F32) {
        v8 f = SPLAT(0.0f);
        if (count >= 8) __builtin_memcpy(&f, (const float *)base + at, 32);
        else __builtin_memcpy(&f, (const float *)base + at, (size_t)count * 4);
        return f;
    }
    v8h words = {0};
    if (count >= 8) __builtin_memcpy(&words, (const uint16_t *)base + at, 16);
    else __builtin_memcpy(&words, (const uint16_t *)base + at, (size_t)count * 2);
    if (dtype == MX_DT_F16) return F16(words);
    v8u wide = __builtin_convertvector(words, v8u) << 16;
    return (v8)wide;
}

/* e^x for x <= 0 within 2 units in the last place; 0 below -87. Cody and Waite's reduction, the polynomial of Cephes' expf. */
MX_INLINE TARGET v8 exp8(v8 x) {
    v8i visible = x > SPLAT(-87.0f);
    x = (v8)((v8i)x & visible);
    v8 shifted = x * SPLAT(1.44269504f) + SPLAT(12582912.0f); /* 1.5 * 2^23: the low bits hold the rounded exponent */
    v8 n = shifted - SPLAT(12582912.0f);
    v8 r = x - n * SPLAT(0.693359375f);
    r = r - n * SPLAT(-2.12194440e-4f);
    v8 p = SPLAT(1.9875691500e-4f);
    p = p * r + SPLAT(1.3981999507e-3f);
    p = p * r + SPLAT(8.3334519073e-3f);
    p = p * r + SPLAT(4.1665795894e-2f);
    p = p * r + SPLAT(1.6666665459e-1f);
    p = p * r + SPLAT(5.0000001201e-1f);
    p = p * (r * r) + r + SPLAT(1.0f);
    v8i exponent = ((v8i)shifted - (v8i)SPLAT(12582912.0f) + 127) << 23;
    return (v8)((v8i)(p * (v8)exponent) & visible);
}

/* cap * tanh(x / cap), by the exponential of -2 |x / cap|. */
MX_INLINE TARGET v8 soft8(v8 x, float cap) {
    v8 t = x / SPLAT(cap);
    v8i sign = (v8i)t & (v8i)SPLAT(-0.0f);
    v8 e = exp8(SPLAT(-2.0f) * (v8)((v8i)t & ~(v8i)SPLAT(-0.0f)));
    v8 positive = (SPLAT(1.0f) - e) / (SPLAT(1.0f) + e);
    return SPLAT(cap) * (v8)((v8i)positive | sign);
}

/* to[0..16 * k) = one key or value of dtype, in float32, zeros behind its last number. */
MX_INLINE TARGET void widen(const char *base, int64_t at, int64_t size, float *to, const int dtype) {
    int64_t d = 0;
    for (; d + 8 <= size; d += 8) {
        v8 part = load8(base, at + d, 8, dtype);
        __builtin_memcpy(to + d, &part, 32);
    }
    for (; d < ((size + 15) & ~15); d += 8) {
        v8 part = d < size ? load8(base, at + d, size - d, dtype) : SPLAT(0.0f);
        __builtin_memcpy(to + d, &part, 32);
    }
}
