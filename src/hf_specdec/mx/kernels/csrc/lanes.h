/* What attention reads, eight numbers at a time, and the functions it takes of them, LANES at a time; with TARGET, F16 and LANES as in
 * attention.h. The same bits under every set of instructions. */
#include "turn.h"

typedef float v8 __attribute__((vector_size(32), aligned(4)));
typedef int32_t v8i __attribute__((vector_size(32), aligned(4)));
typedef float vw __attribute__((vector_size(4 * LANES), aligned(4))); /* as wide as it gets */
typedef int32_t vwi __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint16_t vwh __attribute__((vector_size(2 * LANES), aligned(2)));
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
MX_INLINE TARGET vw expw(vw x) {
    vwi visible = x > -87.0f;
    x = (vw)((vwi)x & visible);
    vw shifted = x * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: the low bits hold the rounded exponent */
    vw n = shifted - 12582912.0f;
    vw r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    vw square = r * r; /* in pairs of terms: half as many of them wait for one another */
    vw p = (r * 1.9875691500e-4f + 1.3981999507e-3f) * square + (r * 8.3334519073e-3f + 4.1665795894e-2f);
    p = p * square + (r * 1.6666665459e-1f + 5.0000001201e-1f);
    p = p * square + r + 1.0f;
    return (vw)(((vwi)p + ((vwi)shifted << 23)) & visible); /* all that is not the exponent is shifted out */
}

/* cap * tanh(x / cap), by the exponential of -2 |x / cap|; NaN stays NaN. */
MX_INLINE TARGET vw softw(vw x, float cap) {
    vw t = x / cap;
    vwi sign = (vwi)t & INT32_MIN, known = t == t;
    vw e = expw((vw)((vwi)t & INT32_MAX) * -2.0f);
    vw positive = (1.0f - e) / (1.0f + e);
    return (vw)((((vwi)positive | sign) & known) | ((vwi)t & ~known)) * cap;
}

/* to[0..16 * k) = one key or value of dtype, in float32, zeros behind its last number. */
MX_INLINE TARGET void widen(const char *base, int64_t at, int64_t size, float *to, const int dtype) {
    int64_t d = 0;
    for (; dtype == MX_DT_BF16 && d + 16 <= size; d += 16)
#pragma GCC unroll 4
        for (int64_t i = d; i < d + 16; i += LANES) {
            vwh words;
            __builtin_memcpy(&words, (const uint16_t *)base + at + i, sizeof words);
            *(vwi *)(to + i) = __builtin_convertvector(words, vwi) << 16;
        }
    for (; d + 8 <= size; d += 8) {
        v8 part = load8(base, at + d, 8, dtype);
        __builtin_memcpy(to + d, &part, 32);
    }
    for (; d < ((size + 15) & ~15); d += 8) {
        v8 part = d < size ? load8(base, at + d, size - d, dtype) : SPLAT(0.0f);
        __builtin_memcpy(to + d, &part, 32);
    }
}

/* to[wide * d + j] = number d of the key in slot s + j, in float32, for `wide` slots; zeros behind the last slot. In bfloat16, the second number
 * of a pair comes first; with `pairs`, pair d as it is stands for number d. */
MX_INLINE TARGET void across(const char *base, int64_t stride, int64_t s, int64_t slots, int64_t size, float *to, const int dtype,
                             const int pairs, const int wide) {
    const int64_t bytes = dtype == MX_DT_F32 ? 4 : 2, turned = dtype == MX_DT_BF16;
    if (dtype == MX_DT_F16 || size * bytes % 32) {
        for (int64_t j = 0; j < wide; j++)
            for (int64_t d = 0; d < size; d += 8) {
                const int64_t left = size - d < 8 ? size - d : 8;
                v8 key = s + j < slots ? load8(base, (s + j) * stride + d, left, dtype) : SPLAT(0.0f);
                for (int64_t i = 0; i < ((left + 1) & ~1); i++) {
                    if (pairs) ((uint16_t *)(to + wide * ((d + i) / 2) + j))[i % 2] = (uint16_t)(mx_bits(key[i]) >> 16);
                    else to[wide * ((d + i) ^ turned) + j] = key[i];
                }
            }
        return;
    }
    for (int64_t j = 0; j < wide; j += 8)
        for (int64_t word = 0; word < size * bytes / 4; word += 8) {
            v8u row[8];
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) {
                row[i] = (v8u){0};
                if (s + j + i < slots) __builtin_memcpy(&row[i], base + (s + j + i) * stride * bytes + 4 * word, 32);
            }
            turn(row);
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) {
                if (dtype == MX_DT_F32 || pairs) {
                    *(v8 *)(to + wide * (word + i) + j) = (v8)row[i];
                } else { /* two numbers in a word */
                    *(v8 *)(to + 2 * wide * (word + i) + j) = (v8)(row[i] & 0xffff0000u);
                    *(v8 *)(to + 2 * wide * (word + i) + wide + j) = (v8)(row[i] << 16);
                }
            }
        }
}

/* A query in the order of the keys that lie across. */
MX_INLINE TARGET void along(const char *base, int64_t at, int64_t size, float *to, const int dtype, const int pairs) {
    const int64_t room = (size + 15) & ~15;
    if (pairs) {
        __builtin_memset(to, 0, (size_t)room * 2);
        __builtin_memcpy(to, (const uint16_t *)base + at, (size_t)size * 2);
        return;
    }
    widen(base, at, size, to, dtype);
    if (dtype == MX_DT_BF16)
        for (int64_t d = 0; d < room; d += 2) {
            const float first = to[d];
            to[d] = to[d + 1], to[d + 1] = first;
        }
}

/* Whether sixteen slots are hidden. */
MX_INLINE TARGET int hides(const float *bias) {
    vwi seen = {0};
    for (int i = 0; i < 16; i += LANES) seen |= *(const vw *)(bias + i) > -__builtin_inff();
    return !ANY(seen);
}

/* Ask for slots s .. last - 1 of keys or values, of `size` bytes each and `stride` bytes apart: a pass has just read all weights, so that they come from memory. */
static __attribute__((noinline)) void ask_slots(const char *base, int64_t stride, int64_t size, int64_t s, int64_t last) {
    for (; s < last; s++)
        for (int64_t at = 0; at < size; at += 64) __builtin_prefetch(base + s * stride + at, 0, 2);
}
