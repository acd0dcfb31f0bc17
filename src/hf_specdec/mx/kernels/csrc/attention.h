/* Attention over a tile of queries; a row is a query of one head. Included once per set of instructions, with
 *   TARGET      the target attribute of every function, or nothing
 *   RUN         the name of the function that is not static
 *   F16(words)  eight float16 numbers to float32
 *   LANES       numbers in the widest vector, 4, 8 or 16
 *   QUERIES     rows multiplied with a key at once, 4 or 12, and
 *   WEIGHTS     with a value, 2 or 3: as many as there are registers for
 *   ANY(lanes)  whether one of the lanes of a comparison is true
 *   DOUBLES(eight)  eight numbers in double precision
 *   HELD(x)     keeps the compiler from reading x again for every use, or not defined
 *   FUSED(a, b, sum)  sum + a * b for a vector a and a number b, rounded once
 *   PAIR(sum, key, query)  sum plus the products of pairs of bfloat16, the second number's first; or not defined
 *
 * Keys and values are read once for all rows of the tile, sixteen or thirty-two slots at a time, but every row has sums of its own: a
 * score goes number after number of the key, in bfloat16 the second of a pair before the first, the rest slot after slot. Both are sums of fused
 * multiply-adds, and nothing else is fused, so that every set of instructions gives the same bits, PAIR's, too, but that it takes subnormal
 * numbers for zero, which is seen where others of the same score are beyond 1e30 alone. A score that is NaN takes no part, either.
 * What a query may not see takes no part in its sums: its weight is zero, and a weight of zero is passed over.
 */
#include "lanes.h"

typedef double v8d __attribute__((vector_size(64), aligned(4)));

#ifndef HELD
#define HELD(x)
#endif
#define AHEAD 128 /* slots of keys, and then of values, that are asked for in advance */
#define BUSY 32   /* rows of a tile that keep its thread busy while they are read */
#ifdef PAIR
#define PAIRS 1
#else
#define PAIRS 0
#define PAIR(sum, key, query) (sum)
#endif

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

/* What is kept for the rows of a tile: query by query, then head by head. */
typedef struct {
    float *query, *block, *scores, *sums; /* query: one number of all rows after another; scores: sixteen slots of all rows after sixteen slots */
    float *bias;                          /* [queries or rows, room], or NULL: all before `end` is seen */
    float *tops;                          /* [rows, 16]: the largest scores so far, in as many lanes as there are */
    v8d *totals;
    int32_t *end; /* behind all slots that the row, or one before it, sees */
    int64_t rows, room, shared; /* rows that share a bias */
} work;

/* The scores of the rows i .. i + rows - 1 for the keys from slot `s` on that lie across, minus infinity where they may not look. */
MX_INLINE TARGET void dots(const mx_attention *a, const work *w, int64_t i, int64_t s, int64_t numbers, const int rows, const int pairs) {
    const int vectors = pairs ? 2 : 16 / LANES;
    const float *query = w->query + i, *keys = w->block, hidden = -__builtin_inff();
    vw sum[12][16 / LANES < 2 ? 2 : 16 / LANES], found[12][16 / LANES < 2 ? 2 : 16 / LANES];
    vwi lane;
    for (int l = 0; l < LANES; l++) lane[l] = l;
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int p = 0; p < vectors; p++) sum[r][p] = (vw){0.0f};
    for (int64_t d = 0; d < numbers; d++)
#pragma GCC unroll 4
        for (int p = 0; p < vectors; p++) {
            const vw key = *(const vw *)(keys + LANES * (vectors * d + p));
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) {
                if (pairs) sum[r][p] = PAIR(sum[r][p], key, query[d * w->rows + r]);
                else sum[r][p] = FUSED(key, query[d * w->rows + r], sum[r][p]);
            }
        }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int p = 0; p < vectors; p++) found[r][p] = sum[r][p];
#pragma GCC unroll 1
    for (int r = 0; r < rows; r++) {
        const float *bias = w->bias ? w->bias + (i + r) / w->shared * w->room + s : 0;
        float *at = w->scores + s * w->rows + 16 * (i + r);
        vw top = *(vw *)(w->tops + 16 * (i + r));
#pragma GCC unroll 4
        for (int p = 0; p < vectors; p++) {
            vw score = found[r][p] * a->scale;
            vwi shown = lane < w->end[i + r] - (int32_t)s - LANES * p;
            if (a->softcap > 0.0f) score = softw(score, a->softcap);
            if (bias) {
                score += *(vw *)(bias + LANES * p);
                shown = *(vw *)(bias + LANES * p) > hidden;
            }
            score = (vw)(((vwi)score & shown) | ((vwi)((vw){0.0f} + hidden) & ~shown));
            *(vw *)(at + LANES * p / 16 * 16 * w->rows + LANES * p % 16) = score;
            const vwi more = score > top;
            top = (vw)(((vwi)score & more) | ((vwi)top & ~more));
        }
        *(vw *)(w->tops + 16 * (i + r)) = top;
    }
}

/* The scores of slots s .. s + 15 become weights. */
MX_INLINE TARGET void weigh(const work *w, int64_t s) {
    float *at = w->scores + s * w->rows;
    int64_t i = 0;
    for (; i < w->rows && s >= w->end[i]; i++, at += 16) __builtin_memset(at, 0, 16 * sizeof(float));
    for (; i < w->rows; i++, at += 16) {
        const float top = w->tops[16 * i];
        vw weights[16 / LANES];
#pragma GCC unroll 4
        for (int p = 0; p < 16 / LANES; p++) *(vw *)(at + LANES * p) = weights[p] = expw(*(vw *)(at + LANES * p) - top);
        v8 half[2];
        __builtin_memcpy(half, weights, sizeof half);
        w->totals[i] = w->totals[i] + DOUBLES(half[0]) + DOUBLES(half[1]);
    }
}

/* Sums of `rows` rows, `far` floats apart, += weights[j] * values[j * step ...) for `slots` slots; `blocks` vectors of each. Of more than
 * one row no weight is zero. */
MX_INLINE TARGET void mix(const float *values, int64_t step, const float *weights, int64_t slots, float *sum, int64_t far, const int rows,
                          const int blocks) {
    vw own[WEIGHTS][64 / LANES], value[64 / LANES];
#pragma GCC unroll 3
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 16
        for (int b = 0; b < blocks; b++) own[i][b] = *(const vw *)(sum + i * far + LANES * b);
    for (int64_t j = 0; j < slots; j++) {
        if (rows == 1 && weights[j] == 0.0f) continue;
#pragma GCC unroll 16
        for (int b = 0; b < blocks; b++) {
            value[b] = *(const vw *)(values + j * step + LANES * b);
            HELD(value[b]);
        }
#pragma GCC unroll 3
        for (int i = 0; i < rows; i++)
#pragma GCC unroll 16
            for (int b = 0; b < blocks; b++) own[i][b] = FUSED(value[b], weights[16 * i + j], own[i][b]);
    }
#pragma GCC unroll 3
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 16
        for (int b = 0; b < blocks; b++) *(vw *)(sum + i * far + LANES * b) = own[i][b];
}

/* The same for all numbers of a value. */
MX_INLINE TARGET void mix_all(const float *values, int64_t step, const float *weights, int64_t slots, float *sum, int64_t dv, const int rows) {
    const int64_t most = rows == 1 ? 64 : 4 * LANES;
    int64_t d = 0;
    for (; d + most <= dv; d += most) mix(values + d, step, weights, slots, sum + d, dv, rows, rows == 1 ? 64 / LANES : 4);
    for (; d < dv; d += 16) mix(values + d, step, weights, slots, sum + d, dv, rows, 16 / LANES);
}

/* How many of the first `slots` slots, of up to sixteen, have no weight of zero in any of `rows` rows, nor has a slot before them. */
MX_INLINE TARGET int64_t solid(const float *weights, int64_t slots, int64_t rows) {
    vwi zero = {0};
    for (int64_t i = 0; i < 16 * rows; i += LANES) zero |= *(const vw *)(weights + i) == 0.0f;
    if (!ANY(zero)) return slots;
    for (int64_t j = 0; j < slots; j++)
        for (int64_t i = 0; i < rows; i++)
            if (weights[16 * i + j] == 0.0f) return j;
    return slots;
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

/* The queries first .. first + count - 1 of all heads that share the keys of `group`, in row b of the batch. */
MX_INLINE TARGET void tile(const mx_attention *a, int64_t b, int64_t group, int64_t first, int64_t count, float *scratch, const int dtype) {
    const int64_t heads = a->heads / a->kv_heads, n = heads * count, room = (a->slots + 31) & ~31, bytes = dtype == MX_DT_F32 ? 4 : 2;
    const int64_t dk = (a->dk + 15) & ~15, dv = (a->dv + 15) & ~15;
    const int pairs = PAIRS && dtype == MX_DT_BF16, wide = pairs ? 32 : 16; /* slots whose keys lie across at once */
    const int64_t numbers = pairs ? (a->dk + 1) / 2 : (a->dk + 1) & ~1;
    work w = {.query = scratch, .rows = n, .room = room, .shared = a->mask && a->mask_stride[1] ? 1 : heads};
    w.scores = w.query + n * dk, w.block = w.scores + n * room, w.sums = w.block + 32 * (dk > dv ? dk : dv), w.tops = w.sums + n * dv;
    w.totals = (v8d *)(w.tops + 16 * n), w.end = (int32_t *)(w.totals + n), w.bias = a->mask ? (float *)(w.end + ((n + 15) & ~15)) : 0;
    const char *keys = (const char *)a->k + (b * a->k_stride[0] + group * a->k_stride[1]) * bytes;
    const char *values = (const char *)a->v + (b * a->v_stride[0] + group * a->v_stride[1]) * bytes;
    int64_t low = a->mask ? a->slots : 0, high = 0, step;
    for (int64_t i = 0; i < n; i++) {
        const int64_t q = first + i / heads, h = group * heads + i % heads;
        along((const char *)a->q, b * a->q_stride[0] + h * a->q_stride[1] + q * a->q_stride[2], a->dk, w.block, dtype, pairs);
        for (int64_t d = 0; d < numbers; d++) w.query[d * n + i] = w.block[d];
        if (!w.bias) {
            high = a->causal && q + 1 < a->slots ? q + 1 : a->slots;
        } else if (i % w.shared == 0) {
            float *bias = w.bias + i / w.shared * room;
            biases(a, b, h, q, bias, room);
            int64_t from = 0, to = a->slots;
            while (from + 16 <= to && hides(bias + from)) from += 16;
            while (from < to && bias[from] == -__builtin_inff()) from++;
            while (from + 16 <= to && hides(bias + to - 16)) to -= 16;
            while (from < to && bias[to - 1] == -__builtin_inff()) to--;
            if (from < to) low = from < low ? from : low, high = to > high ? to : high;
        }
        w.end[i] = (int32_t)high;
        *(vw *)(w.tops + 16 * i) = (vw){0.0f} - __builtin_inff();
    }
    const int64_t key_step = a->k_stride[2] * bytes, value_step = a->v_stride[2] * bytes, key_bytes = a->dk * bytes, value_bytes = a->dv * bytes;
    const int64_t asked = n < BUSY ? high : 0;
    ask_slots(keys, key_step, key_bytes, low, low + AHEAD < asked ? low + AHEAD : asked);
    for (int64_t s = low & -wide; s < high; s += wide) {
        const int64_t next = s + AHEAD, turn = low + next - high; /* behind the last keys come the first values */
        if (next < high) ask_slots(keys, key_step, key_bytes, next, next + wide < asked ? next + wide : asked);
        else ask_slots(values, value_step, value_bytes, turn, turn + wide < asked ? turn + wide : asked);
        across(keys, a->k_stride[2], s, a->slots, a->dk, w.block, dtype, pairs, wide);
        int64_t i = 0;
#define SCORE(many) \
    for (; i + many <= n; i += many) \
        if (s < w.end[i + many - 1]) dots(a, &w, i, s, numbers, many, pairs)
        if (QUERIES >= 12 && !pairs) SCORE(12);
        if (QUERIES >= 6) SCORE(6);
        SCORE(4);
        SCORE(3);
        SCORE(2);
        SCORE(1);
#undef SCORE
    }
    for (int64_t i = 0; i < n; i++) {
        float *top = w.tops + 16 * i;
        for (int l = 1; l < LANES; l++) top[0] = top[l] > top[0] ? top[l] : top[0];
        const float *sink = a->sinks ? a->sinks + group * heads + i % heads : 0;
        if (sink && *sink > top[0]) top[0] = *sink;
        w.totals[i] = (v8d){0.0};
    }
    __builtin_memset(w.sums, 0, (size_t)(n * dv) * sizeof(float));
    for (int64_t s = low & -16; s < high; s += 16) {
        const float *value = sixteen(values, a->v_stride[2], s, a->slots, a->dv, w.block, &step, dtype);
        ask_slots(values, value_step, value_bytes, s + AHEAD, s + AHEAD + 16 < asked ? s + AHEAD + 16 : asked);
        weigh(&w, s);
        for (int64_t i = 0; i < n;) {
            const int64_t rows = n - i < WEIGHTS ? n - i : WEIGHTS, left = w.end[i + rows - 1] - s, slots = left < 16 ? left : 16;
            const float *weights = w.scores + s * n + 16 * i;
            const int64_t safe = rows > 1 && slots > 0 ? solid(weights, slots, rows) : 0;
            if (safe && rows == 2) mix_all(value, step, weights, safe, w.sums + i * dv, dv, 2);
            else if (safe) mix_all(value, step, weights, safe, w.sums + i * dv, dv, WEIGHTS);
            for (const int64_t last = i + rows; i < last; i++, weights += 16)
                if (safe < slots) mix_all(value + safe * step, step, weights + safe, slots - safe, w.sums + i * dv, dv, 1);
        }
    }
    for (int64_t i = 0; i < n; i++) {
        const int64_t h = group * heads + i % heads, at = ((b * a->queries + first + i / heads) * a->heads + h) * a->dv;
        double total = 0.0;
        for (int l = 0; l < 8; l++) total += w.totals[i][l]; /* a slot's lane is its number modulo eight */
        if (a->sinks) total += expw((vw){0.0f} + (a->sinks[h] - w.tops[16 * i]))[0];
        const float share = total > 0.0 ? (float)(1.0 / total) : 0.0f;
        for (int64_t d = 0; d < a->dv; d++) {
            float y = w.sums[i * dv + d] * share;
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
