/* Attention over a tile of queries. Included once per set of instructions, with
 *   TARGET      the target attribute of every function, or nothing
 *   RUN         the name of the function that is not static
 *   F16(words)  eight float16 numbers to float32
 *
 * Keys and values are read once for all queries of the tile, sixteen slots at a time, but every query has sums of its own:
 * a score is sixteen partial sums in the order that the head size fixes, the rest goes slot after slot. Multiplications and
 * additions are not fused, so that every set of instructions gives the same bits. What a query may not see takes no part in
 * its sums: its weight is zero, and a weight of zero is passed over.
 */
#include "mx.h"

typedef float v8 __attribute__((vector_size(32), aligned(4)));
typedef int32_t v8i __attribute__((vector_size(32), aligned(4)));
typedef uint32_t v8u __attribute__((vector_size(32), aligned(4)));
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

#if defined(__clang__)
#define SHUFFLE(v, ...) __builtin_shufflevector(v, v, __VA_ARGS__)
#else
#define SHUFFLE(v, ...) __builtin_shuffle(v, (v8i){__VA_ARGS__})
#endif

/* Lanes 0..7 by halves: (0+4, 1+5, 2+6, 3+7), then (0+2, 1+3), then 0+1. */
MX_INLINE TARGET float sum8(v8 v) {
    v += SHUFFLE(v, 4, 5, 6, 7, 0, 1, 2, 3);
    v += SHUFFLE(v, 2, 3, 0, 1, 6, 7, 4, 5);
    return v[0] + v[1];
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

MX_INLINE TARGET float masked(const mx_attention *a, int64_t at) {
    switch (a->mask_dtype) {
        case MX_DT_F32: return ((const float *)a->mask)[at];
        case MX_DT_BF16: return mx_from_bits((uint32_t)((const uint16_t *)a->mask)[at] << 16);
        case MX_DT_F16: return mx_from_f16(((const uint16_t *)a->mask)[at]);
        default: return ((const uint8_t *)a->mask)[at] ? 0.0f : -__builtin_inff();
    }
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

/* What the mask adds to every slot for query `q` of head `h` in row `b`, minus infinity where it may not look; up to `room`. */
MX_INLINE TARGET void biases(const mx_attention *a, int64_t b, int64_t h, int64_t q, float *bias, int64_t room) {
    const int64_t end = a->causal && q + 1 < a->slots ? q + 1 : a->slots, step = a->mask_stride[3];
    const int64_t at = b * a->mask_stride[0] + h * a->mask_stride[1] + q * a->mask_stride[2];
    const float nothing = a->nothing, hidden = -__builtin_inff();
    if (!a->mask)
        for (int64_t s = 0; s < end; s++) bias[s] = 0.0f;
    else if (a->mask_dtype == MX_DT_F32 && step == 1)
        for (int64_t s = 0; s < end; s++) {
            float value = ((const float *)a->mask)[at + s];
            bias[s] = value > nothing ? value : hidden;
        }
    else if (a->mask_dtype == MX_DT_BF16 && step == 1)
        for (int64_t s = 0; s < end; s++) {
            float value = mx_from_bits((uint32_t)((const uint16_t *)a->mask)[at + s] << 16);
            bias[s] = value > nothing ? value : hidden;
        }
    else
        for (int64_t s = 0; s < end; s++) {
            float value = masked(a, at + s * step);
            bias[s] = value > nothing ? value : hidden;
        }
    for (int64_t s = end; s < room; s++) bias[s] = hidden;
}

#define MIX2(x, y, ...) __builtin_shuffle(x, y, (v8i){__VA_ARGS__})
#if defined(__clang__)
#undef MIX2
#define MIX2(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#endif

/* (sum8(x[0]), ..., sum8(x[7])), each by the additions of sum8. */
MX_INLINE TARGET v8 sum8x8(const v8 *x) {
    v8 y[4], z[2];
    for (int i = 0; i < 4; i++)
        y[i] = MIX2(x[2 * i], x[2 * i + 1], 0, 1, 2, 3, 8, 9, 10, 11) + MIX2(x[2 * i], x[2 * i + 1], 4, 5, 6, 7, 12, 13, 14, 15);
    for (int i = 0; i < 2; i++)
        z[i] = MIX2(y[2 * i], y[2 * i + 1], 0, 1, 8, 9, 4, 5, 12, 13) + MIX2(y[2 * i], y[2 * i + 1], 2, 3, 10, 11, 6, 7, 14, 15);
    v8 sums = MIX2(z[0], z[1], 0, 2, 8, 10, 4, 6, 12, 14) + MIX2(z[0], z[1], 1, 3, 9, 11, 5, 7, 13, 15);
    return SHUFFLE(sums, 0, 4, 1, 5, 2, 6, 3, 7); /* they come as 0 2 4 6 1 3 5 7 */
}

/* Products of one query with eight keys that lie `step` floats apart; all of them have a multiple of sixteen numbers. */
MX_INLINE TARGET v8 dots(const float *query, const float *keys, int64_t step, int64_t size) {
    v8 sum[8];
    for (int half = 0; half < 8; half += 4) {
        const float *key = keys + half * step;
        v8 even[4] = {SPLAT(0.0f), SPLAT(0.0f), SPLAT(0.0f), SPLAT(0.0f)}, odd[4] = {even[0], even[0], even[0], even[0]};
        for (int64_t d = 0; d < size; d += 16) {
            const v8 first = *(const v8 *)(query + d), second = *(const v8 *)(query + d + 8);
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
                even[j] += first * *(const v8 *)(key + j * step + d);
                odd[j] += second * *(const v8 *)(key + j * step + d + 8);
            }
        }
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) sum[half + j] = even[j] + odd[j];
    }
    return sum8x8(sum);
}

/* sum[0..8 * blocks) += weights[j] * values[j * step ...) for `slots` slots. */
MX_INLINE TARGET void mix(const float *values, int64_t step, const float *weights, int64_t slots, float *sum, const int blocks) {
    v8 own[8];
#pragma GCC unroll 8
    for (int i = 0; i < blocks; i++) own[i] = *(const v8 *)(sum + 8 * i);
    for (int64_t j = 0; j < slots; j++) {
        if (weights[j] == 0.0f) continue;
        const v8 weight = SPLAT(weights[j]);
#pragma GCC unroll 8
        for (int i = 0; i < blocks; i++) own[i] += weight * *(const v8 *)(values + j * step + 8 * i);
    }
#pragma GCC unroll 8
    for (int i = 0; i < blocks; i++) *(v8 *)(sum + 8 * i) = own[i];
}

/* Sixteen rows of keys or values from slot `s` on, in float32: where they lie, if they can be read there, else in `block`. */
MX_INLINE TARGET const float *sixteen(const char *base, int64_t stride, int64_t s, int64_t slots, int64_t size, float *block, int64_t *step,
                                      const int dtype) {
    if (dtype == MX_DT_F32 && size % 16 == 0 && s + 16 <= slots) {
        *step = stride;
        return (const float *)base + s * stride;
    }
    *step = (size + 15) & ~15;
    for (int64_t j = 0; j < 16; j++)
        if (s + j < slots) widen(base, (s + j) * stride, size, block + j * *step, dtype);
    return block;
}

/* The queries first .. first + count - 1 of all heads that share the keys of `group`, in row b; query by query, then head by head. */
MX_INLINE TARGET void tile(const mx_attention *a, int64_t b, int64_t group, int64_t first, int64_t count, float *scratch, const int dtype) {
    const int64_t heads = a->heads / a->kv_heads, n = heads * count, room = (a->slots + 15) & ~15, bytes = dtype == MX_DT_F32 ? 4 : 2;
    const int64_t dk = (a->dk + 15) & ~15, dv = (a->dv + 15) & ~15;
    float *query = scratch, *scores = query + n * dk, *block = scores + n * room, *sum = block + 16 * (dk > dv ? dk : dv);
    const char *keys = (const char *)a->k + (b * a->k_stride[0] + group * a->k_stride[1]) * bytes;
    const char *values = (const char *)a->v + (b * a->v_stride[0] + group * a->v_stride[1]) * bytes;
    int64_t low = a->slots, high = 0, step;
    for (int64_t i = 0; i < n; i++) {
        const int64_t q = first + i / heads, h = group * heads + i % heads;
        float *bias = scores + i * room;
        widen((const char *)a->q, b * a->q_stride[0] + h * a->q_stride[1] + q * a->q_stride[2], a->dk, query + i * dk, dtype);
        if (i % heads && !(a->mask && a->mask_stride[1])) {
            __builtin_memcpy(bias, bias - room, (size_t)room * sizeof(float));
            continue;
        }
        biases(a, b, h, q, bias, room);
        int64_t from = 0, to = a->slots;
        while (from < to && bias[from] == -__builtin_inff()) from++;
        while (from < to && bias[to - 1] == -__builtin_inff()) to--;
        if (from < to) low = from < low ? from : low, high = to > high ? to : high;
    }
    for (int64_t s = low & ~15; s < high; s += 16) {
        const float *key = sixteen(keys, a->k_stride[2], s, a->slots, a->dk, block, &step, dtype);
        for (int64_t i = 0; i < n; i++)
            for (int64_t half = 0; half < 16; half += 8) {
                v8 score = dots(query + i * dk, key + half * step, step, dk) * SPLAT(a->scale);
                if (a->softcap > 0.0f) score = soft8(score, a->softcap);
                v8 *at = (v8 *)(scores + i * room + s + half), bias = *at;
                v8i shown = bias > SPLAT(-__builtin_inff());
                *at = (v8)(((v8i)(score + bias) & shown) | ((v8i)bias & ~shown));
            }
    }
    for (int64_t i = 0; i < n; i++) {
        float top = -__builtin_inff(), *own = scores + i * room;
        double total = 0.0;
        for (int64_t s = low; s < high; s++) top = own[s] > top ? own[s] : top;
        const float *sink = a->sinks ? a->sinks + group * heads + i % heads : 0;
        if (sink && *sink > top) top = *sink;
        for (int64_t s = low & ~15; s < high; s += 8) {
            v8 *at = (v8 *)(own + s);
            *at = top > -__builtin_inff() ? exp8(*at - SPLAT(top)) : SPLAT(0.0f);
        }
        for (int64_t s = low; s < high; s++) total += own[s];
        if (sink) total += exp8(SPLAT(*sink - top))[0];
        query[i] = total > 0.0 ? (float)(1.0 / total) : 0.0f; /* the queries themselves are no longer needed */
        __builtin_memset(sum + i * dv, 0, (size_t)dv * sizeof(float));
    }
    for (int64_t s = low & ~15; s < high; s += 16) {
        const float *value = sixteen(values, a->v_stride[2], s, a->slots, a->dv, block, &step, dtype);
        const int64_t slots = s + 16 < high ? 16 : high - s;
        for (int64_t i = 0; i < n; i++) {
            int64_t d = 0;
            for (; d + 64 <= dv; d += 64) mix(value + d, step, scores + i * room + s, slots, sum + i * dv + d, 8);
            for (; d < dv; d += 16) mix(value + d, step, scores + i * room + s, slots, sum + i * dv + d, 2);
        }
    }
    for (int64_t i = 0; i < n; i++) {
        const int64_t at = ((b * a->queries + first + i / heads) * a->heads + group * heads + i % heads) * a->dv;
        for (int64_t d = 0; d < a->dv; d++) {
            float y = sum[i * dv + d] * query[i];
            if (dtype == MX_DT_F32) ((float *)a->out)[at + d] = y;
            else ((uint16_t *)a->out)[at + d] = dtype == MX_DT_BF16 ? mx_to_bf16(y) : mx_to_f16(y);
        }
    }
}

TARGET void RUN(const mx_attention *a, int64_t b, int64_t group, int64_t first, int64_t count, float *scratch) {
    if (a->dtype == MX_DT_F32) tile(a, b, group, first, count, scratch, MX_DT_F32);
    else if (a->dtype == MX_DT_BF16) tile(a, b, group, first, count, scratch, MX_DT_BF16);
    else tile(a, b, group, first, count, scratch, MX_DT_F16);
}
