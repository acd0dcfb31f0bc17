/* Attention of one query of one head, on its own. Included once per set of instructions, with
 *   TARGET      the target attribute of every function, or nothing
 *   RUN         the name of the function that is not static
 *   F16(words)  eight float16 numbers to float32
 *
 * Sums are plain multiplications and additions (no fused ones) of eight lanes in an order that the head size alone fixes, so
 * that every set of instructions gives the same bits. What a query may not see takes no part, not even as a zero.
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

/* The slots that query `q` of head `h` in row `b` sees, in ascending order, and what the mask adds to each. */
MX_INLINE TARGET int64_t visible(const mx_attention *a, int64_t b, int64_t h, int64_t q, int32_t *slot, float *bias) {
    int64_t n = 0, end = a->causal && q + 1 < a->slots ? q + 1 : a->slots;
    if (!a->mask) {
        for (; n < end; n++) slot[n] = (int32_t)n, bias[n] = 0.0f;
        return n;
    }
    const int64_t first = b * a->mask_stride[0] + h * a->mask_stride[1] + q * a->mask_stride[2];
    for (int64_t s = 0; s < end; s++) {
        float value = masked(a, first + s * a->mask_stride[3]);
        slot[n] = (int32_t)s, bias[n] = value;
        n += value > a->nothing;
    }
    return n;
}

/* scores[j] = scale * q . k_slot[j], capped, plus the mask; up to a multiple of eight, the others minus infinity. Returns the
 * largest. */
MX_INLINE TARGET float score(const mx_attention *a, const float *query, const char *keys, const int32_t *slot, const float *bias,
                             int64_t n, float *scores, const int dtype) {
    const int64_t stride = a->k_stride[2], d8 = a->dk & ~7;
    for (int64_t j = 0; j < n; j++) {
        v8 sum[2] = {SPLAT(0.0f), SPLAT(0.0f)};
        int64_t at = slot[j] * stride, d = 0;
        for (; d + 16 <= d8; d += 16) {
            sum[0] += *(const v8 *)(query + d) * load8(keys, at + d, 8, dtype);
            sum[1] += *(const v8 *)(query + d + 8) * load8(keys, at + d + 8, 8, dtype);
        }
        if (d < d8) sum[0] += *(const v8 *)(query + d) * load8(keys, at + d, 8, dtype), d += 8;
        if (d < a->dk) sum[1] += *(const v8 *)(query + d) * load8(keys, at + d, a->dk - d, dtype);
        scores[j] = sum8(sum[0] + sum[1]) * a->scale;
    }
    for (int64_t j = n; j < ((n + 7) & ~7); j++) scores[j] = 0.0f;
    if (a->softcap > 0.0f)
        for (int64_t j = 0; j < n; j += 8) *(v8 *)(scores + j) = soft8(*(const v8 *)(scores + j), a->softcap);
    float top = -__builtin_inff();
    for (int64_t j = 0; j < n; j++) {
        scores[j] += bias[j];
        top = scores[j] > top ? scores[j] : top;
    }
    for (int64_t j = n; j < ((n + 7) & ~7); j++) scores[j] = -__builtin_inff();
    return top;
}

/* out[0..8 * blocks) = sum over j of weights[j] * v_slot[j], then times `factor`; the last `count` numbers of a head if fewer. */
MX_INLINE TARGET void mix(const mx_attention *a, const char *values, int64_t first, const int32_t *slot, const float *weights,
                          int64_t n, float factor, int64_t at, const int blocks, int64_t count, const int dtype) {
    v8 sum[8];
    for (int i = 0; i < blocks; i++) sum[i] = SPLAT(0.0f);
    for (int64_t j = 0; j < n; j++) {
        v8 weight = SPLAT(weights[j]);
        int64_t from = slot[j] * a->v_stride[2] + first;
#pragma GCC unroll 8
        for (int i = 0; i < blocks; i++) sum[i] += weight * load8(values, from + 8 * i, count - 8 * i, dtype);
    }
    for (int i = 0; i < blocks; i++)
        for (int l = 0; l < 8 && 8 * i + l < count; l++) {
            float y = sum[i][l] * factor;
            int64_t to = at + first + 8 * i + l;
            if (dtype == MX_DT_F32) ((float *)a->out)[to] = y;
            else ((uint16_t *)a->out)[to] = dtype == MX_DT_BF16 ? mx_to_bf16(y) : mx_to_f16(y);
        }
}

MX_INLINE TARGET void attend(const mx_attention *a, int64_t b, int64_t h, int64_t q, const int32_t *slot, const float *bias,
                             int64_t n, float *scratch, const int dtype) {
    const int64_t size = dtype == MX_DT_F32 ? 4 : 2, group = h / (a->heads / a->kv_heads);
    const char *query = (const char *)a->q + (b * a->q_stride[0] + h * a->q_stride[1] + q * a->q_stride[2]) * size;
    const char *keys = (const char *)a->k + (b * a->k_stride[0] + group * a->k_stride[1]) * size;
    const char *values = (const char *)a->v + (b * a->v_stride[0] + group * a->v_stride[1]) * size;
    float *wide = scratch, *scores = scratch + ((a->dk + 7) & ~7);
    for (int64_t d = 0; d < a->dk; d += 8) {
        v8 part = load8(query, d, a->dk - d, dtype);
        __builtin_memcpy(wide + d, &part, 32);
    }
    float top = score(a, wide, keys, slot, bias, n, scores, dtype);
    if (a->sinks && a->sinks[h] > top) top = a->sinks[h];
    v8 sum = SPLAT(0.0f);
    for (int64_t j = 0; j < n; j += 8) {
        v8 weight = exp8(*(const v8 *)(scores + j) - SPLAT(top));
        __builtin_memcpy(scores + j, &weight, 32);
        sum += weight;
    }
    float total = sum8(sum);
    if (a->sinks) total += exp8(SPLAT(a->sinks[h] - top))[0];
    const float factor = n ? 1.0f / total : 0.0f;
    const int64_t at = ((b * a->queries + q) * a->heads + h) * a->dv;
    int64_t first = 0;
    for (; first + 64 <= a->dv; first += 64) mix(a, values, first, slot, scores, n, factor, at, 8, 64, dtype);
    for (; first + 32 <= a->dv; first += 32) mix(a, values, first, slot, scores, n, factor, at, 4, 32, dtype);
    for (; first < a->dv; first += 8) mix(a, values, first, slot, scores, n, factor, at, 1, a->dv - first, dtype);
}

#define ALL_HEADS(DTYPE)                                                                                             \
    for (int64_t h = group * heads; h < (group + 1) * heads; h++) {                                                  \
        if (h == group * heads || (a->mask && a->mask_stride[1])) n = visible(a, b, h, q, slot, bias);               \
        attend(a, b, h, q, slot, bias, n, scratch, DTYPE);                                                           \
    }

/* All heads that share the keys of head `group`, for query q of row b. */
TARGET void RUN(const mx_attention *a, int64_t b, int64_t group, int64_t q, int32_t *slot, float *bias, float *scratch) {
    const int64_t heads = a->heads / a->kv_heads;
    int64_t n = 0;
    if (a->dtype == MX_DT_F32) { ALL_HEADS(MX_DT_F32) }
    else if (a->dtype == MX_DT_BF16) { ALL_HEADS(MX_DT_BF16) }
    else { ALL_HEADS(MX_DT_F16) }
}
