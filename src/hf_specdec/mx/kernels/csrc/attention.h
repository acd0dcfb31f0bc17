/* Attention over a tile of queries. Included once per set of instructions, with
 *   TARGET      the target attribute of every function, or nothing
 *   RUN         the name of the function that is not static
 *   F16(words)  eight float16 numbers to float32
 *   LANES       numbers in the widest vector, 4, 8 or 16
 *   QUERIES     multiplied with a key at once: as many as there are registers for, up to 4
 *
 * Keys and values are read once for all queries of the tile, sixteen slots at a time, but every query has sums of its own:
 * a score goes number after number of the key, the rest slot after slot. Multiplications and
 * additions are not fused, so that every set of instructions gives the same bits. What a query may not see takes no part in
 * its sums: its weight is zero, and a weight of zero is passed over.
 */
#include "lanes.h"

typedef double v8d __attribute__((vector_size(64)));
typedef float vw __attribute__((vector_size(4 * LANES), aligned(4))); /* as wide as it gets */

MX_INLINE TARGET float masked(const mx_attention *a, int64_t at) {
    switch (a->mask_dtype) {
        case MX_DT_F32: return ((const float *)a->mask)[at];
        case MX_DT_BF16: return mx_from_bits((uint32_t)((const uint16_t *)a->mask)[at] << 16);
        case MX_DT_F16: return mx_from_f16(((const uint16_t *)a->mask)[at]);
        default: return ((const uint8_t *)a->mask)[at] ? 0.0f : -__builtin_inff();
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

/* to[16 * d + j] = number d of the key in slot s + j, in float32; zeros behind the last slot. */
MX_INLINE TARGET void across(const char *base, int64_t stride, int64_t s, int64_t slots, int64_t size, float *to, const int dtype) {
    const int64_t bytes = dtype == MX_DT_F32 ? 4 : 2;
    if (dtype == MX_DT_F16 || size * bytes % 32) {
        for (int64_t d = 0; d < size; d += 8) {
            float part[8];
            const int64_t count = size - d < 8 ? size - d : 8;
            for (int64_t j = 0; j < 16; j++) {
                v8 key = s + j < slots ? load8(base, (s + j) * stride + d, count, dtype) : SPLAT(0.0f);
                __builtin_memcpy(part, &key, sizeof part);
                for (int64_t i = 0; i < count; i++) to[16 * (d + i) + j] = part[i];
            }
        }
        return;
    }
    for (int64_t j = 0; j < 16; j += 8)
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
                if (dtype == MX_DT_F32) {
                    *(v8 *)(to + 16 * (word + i) + j) = (v8)row[i];
                } else { /* two numbers in a word */
                    *(v8 *)(to + 32 * (word + i) + j) = (v8)(row[i] << 16);
                    *(v8 *)(to + 32 * (word + i) + 16 + j) = (v8)(row[i] & 0xffff0000u);
                }
            }
        }
}

/* scores[2 * i], scores[2 * i + 1] = the products of `queries` queries, `far` floats apart, with sixteen keys that lie across. */
MX_INLINE TARGET void dots(const float *query, int64_t far, const float *keys, int64_t size, v8 *scores, const int queries) {
    vw sum[4][16 / LANES];
#pragma GCC unroll 4
    for (int i = 0; i < queries; i++)
#pragma GCC unroll 4
        for (int p = 0; p < 16 / LANES; p++) sum[i][p] = (vw){0.0f};
    for (int64_t d = 0; d < size; d++)
#pragma GCC unroll 4
        for (int p = 0; p < 16 / LANES; p++) {
            const vw key = *(const vw *)(keys + 16 * d + LANES * p);
#pragma GCC unroll 4
            for (int i = 0; i < queries; i++) sum[i][p] += query[i * far + d] * key;
        }
#pragma GCC unroll 4
    for (int i = 0; i < queries; i++) __builtin_memcpy(scores + 2 * i, sum[i], 64);
}

/* sum[0..LANES * blocks) += weights[j] * values[j * step ...) for `slots` slots. */
MX_INLINE TARGET void mix(const float *values, int64_t step, const float *weights, int64_t slots, float *sum, const int blocks) {
    vw own[64 / LANES];
#pragma GCC unroll 16
    for (int i = 0; i < blocks; i++) own[i] = *(const vw *)(sum + LANES * i);
    for (int64_t j = 0; j < slots; j++) {
        if (weights[j] == 0.0f) continue;
#pragma GCC unroll 16
        for (int i = 0; i < blocks; i++) own[i] += weights[j] * *(const vw *)(values + j * step + LANES * i);
    }
#pragma GCC unroll 16
    for (int i = 0; i < blocks; i++) *(vw *)(sum + LANES * i) = own[i];
}

/* The same over sixteen slots for two queries, whose sums are `far` floats apart and whose weights `room`; none of the weights is zero. */
MX_INLINE TARGET void mix_two(const float *values, int64_t step, const float *weights, int64_t room, float *sum, int64_t far,
                              const int blocks) {
    vw own[2][4];
#pragma GCC unroll 4
    for (int i = 0; i < blocks; i++) own[0][i] = *(const vw *)(sum + LANES * i), own[1][i] = *(const vw *)(sum + far + LANES * i);
    for (int64_t j = 0; j < 16; j++)
#pragma GCC unroll 4
        for (int i = 0; i < blocks; i++) {
            const vw value = *(const vw *)(values + j * step + LANES * i);
            own[0][i] += weights[j] * value;
            own[1][i] += weights[room + j] * value;
        }
#pragma GCC unroll 4
    for (int i = 0; i < blocks; i++) *(vw *)(sum + LANES * i) = own[0][i], *(vw *)(sum + far + LANES * i) = own[1][i];
}

/* Whether sixteen weights of two queries have no zero among them. */
MX_INLINE TARGET int none_is_zero(const float *one, const float *other) {
    const v8 nothing = SPLAT(0.0f);
    v8i zero = (*(const v8 *)one == nothing) | (*(const v8 *)(one + 8) == nothing) | (*(const v8 *)other == nothing) |
               (*(const v8 *)(other + 8) == nothing);
    uint64_t words[4];
    __builtin_memcpy(words, &zero, sizeof words);
    return !(words[0] | words[1] | words[2] | words[3]);
}

/* Sixteen rows of values from slot `s` on, in float32: where they lie, if they can be read there, else in `block`. */
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
        v8 found[8];
        across(keys, a->k_stride[2], s, a->slots, a->dk, block, dtype);
        for (int64_t i = 0; i < n; i += QUERIES) {
            const int64_t count = n - i < QUERIES ? n - i : QUERIES;
            switch (count) {
                case 1: dots(query + i * dk, dk, block, a->dk, found, 1); break;
                case 2: dots(query + i * dk, dk, block, a->dk, found, 2); break;
                case 3: dots(query + i * dk, dk, block, a->dk, found, 3); break;
                default: dots(query + i * dk, dk, block, a->dk, found, 4);
            }
            for (int64_t j = 0; j < 2 * count; j++) {
                v8 score = found[j] * SPLAT(a->scale);
                if (a->softcap > 0.0f) score = soft8(score, a->softcap);
                v8 *at = (v8 *)(scores + (i + j / 2) * room + s + j % 2 * 8), bias = *at;
                v8i shown = bias > SPLAT(-__builtin_inff());
                *at = (v8)(((v8i)(score + bias) & shown) | ((v8i)bias & ~shown));
            }
        }
    }
    for (int64_t i = 0; i < n; i++) {
        float top = -__builtin_inff(), *own = scores + i * room;
        v8 tops = SPLAT(top);
        v8d totals = {0.0};
        for (int64_t s = low & ~15; s < high; s += 8) {
            const v8 score = *(v8 *)(own + s);
            const v8i more = score > tops;
            tops = (v8)(((v8i)score & more) | ((v8i)tops & ~more));
        }
        for (int l = 0; l < 8; l++) top = tops[l] > top ? tops[l] : top;
        const float *sink = a->sinks ? a->sinks + group * heads + i % heads : 0;
        if (sink && *sink > top) top = *sink;
        for (int64_t s = low & ~15; s < high; s += 8) {
            v8 *at = (v8 *)(own + s);
            *at = top > -__builtin_inff() ? exp8(*at - SPLAT(top)) : SPLAT(0.0f);
            totals += __builtin_convertvector(*at, v8d);
        }
        double total = 0.0;
        for (int l = 0; l < 8; l++) total += totals[l]; /* a slot's lane is its number modulo eight */
        if (sink) total += exp8(SPLAT(*sink - top))[0];
        query[i] = total > 0.0 ? (float)(1.0 / total) : 0.0f; /* the queries themselves are no longer needed */
        __builtin_memset(sum + i * dv, 0, (size_t)dv * sizeof(float));
    }
    for (int64_t s = low & ~15; s < high; s += 16) {
        const float *value = sixteen(values, a->v_stride[2], s, a->slots, a->dv, block, &step, dtype);
        const int64_t slots = s + 16 < high ? 16 : high - s;
        for (int64_t i = 0; i < n; i++) {
            const float *weights = scores + i * room + s;
            int64_t d = 0;
            if (LANES == 16 && slots == 16 && i + 1 < n && none_is_zero(weights, weights + room)) {
                for (; d + 64 <= dv; d += 64) mix_two(value + d, step, weights, room, sum + i * dv + d, dv, 4);
                for (; d < dv; d += 16) mix_two(value + d, step, weights, room, sum + i * dv + d, dv, 1);
                i++;
                continue;
            }
            for (; d + 64 <= dv; d += 64) mix(value + d, step, weights, slots, sum + i * dv + d, 64 / LANES);
            for (; d < dv; d += 16) mix(value + d, step, weights, slots, sum + i * dv + d, 16 / LANES);
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
