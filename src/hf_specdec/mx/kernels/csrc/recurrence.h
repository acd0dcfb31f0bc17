/* The functions of recurrence.c for one set of instructions. Included once for each, with
 *   TARGET      the target attribute of every function, or nothing
 *   NAME(what)  the name of a function */

/* Sixteen numbers that lie side by side. */
MX_INLINE TARGET v16 NAME(get16)(const void *numbers, int64_t i, const int half) {
    v16h words;
    if (!half) return *(const v16 *)((const float *)numbers + i);
    __builtin_memcpy(&words, (const uint16_t *)numbers + i, sizeof words);
    return (v16)(__builtin_convertvector(words, v16u) << 16);
}

/* As mx_to_bf16, in float32. */
MX_INLINE TARGET v16 NAME(rounded)(v16 value) {
    const v16u bits = (v16u)value, words = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
    const v16i number = value == value;
    return (v16)((words & (v16u)number) | (0x7fc00000u & ~(v16u)number));
}

MX_INLINE TARGET void NAME(put16)(void *numbers, int64_t i, v16 value, const int half) {
    if (!half) {
        *(v16 *)((float *)numbers + i) = value;
        return;
    }
    const v16h words = __builtin_convertvector((v16u)NAME(rounded)(value) >> 16, v16h);
    __builtin_memcpy((uint16_t *)numbers + i, &words, sizeof words);
}

MX_INLINE TARGET float NAME(sum16)(v16 values) {
    v8 eight[2];
    v4 four[2];
    __builtin_memcpy(eight, &values, sizeof eight);
    eight[0] += eight[1];
    __builtin_memcpy(four, eight, sizeof four);
    four[0] += four[1];
    return (four[0][0] + four[0][1]) + (four[0][2] + four[0][3]);
}

/* to[0..n) = factor times n numbers, divided by their length (and the root of eps) unless eps < 0. `to` has zeros up to a multiple of sixteen. */
MX_INLINE TARGET void NAME(gather)(const void *from, int64_t at, int64_t step, int64_t n, float *to, float eps, float factor, const int half) {
    const int64_t room = (n + 15) & ~15;
    for (int64_t i = 0; i < n; i++) to[i] = get(from, at + i * step, half);
    for (int64_t i = n; i < room; i++) to[i] = 0.0f;
    if (eps >= 0) {
        v16 sums = {0};
        for (int64_t i = 0; i < room; i += 16) sums += *(v16 *)(to + i) * *(v16 *)(to + i);
        factor *= 1.0f / sqrtf(NAME(sum16)(sums) + eps);
    }
    for (int64_t i = 0; i < room; i += 16) *(v16 *)(to + i) *= factor;
}

/* --- gated delta rules: S <- S diag(e^g); S <- S + beta (v - S k) k'; out = S q, of a column of S after the other ------------------------- */

/* Columns first .. first + columns - 1 of a head's state through `tokens` tokens, the first of which is number `t`. */
MX_INLINE TARGET void NAME(delta_columns)(const mx_delta_job *job, delta_work *w, int64_t b, int64_t h, int64_t t, int64_t tokens, int64_t first, int64_t columns,
                                    const int half, const int by_channel) {
    const int64_t head = (b * job->h + h) * job->nk * job->nv + first;
    const float *from = t ? job->next : job->state;
    for (int64_t i = 0; i < job->nk; i++) {
        w->s[i][0] = w->s[i][1] = (v16){0};
        if (from) __builtin_memcpy(w->s[i], from + head + i * job->nv, (size_t)columns * 4);
    }
    for (int64_t own = 0; own < tokens; own++) {
        const float *q = w->q[own], *k = w->k[own];
        float value[COLUMNS] = {0};
        for (int64_t j = 0; j < columns; j++)
            value[j] = get(job->v, b * job->v_stride[0] + (t + own) * job->v_stride[1] + h * job->v_stride[2] + (first + j) * job->v_stride[3], half);
        v16 known[2][2] = {{{0}}}, seen[2][2] = {{{0}}}, more[2];
        for (int64_t i = 0; i < job->nk; i++) {
            const float decay = w->decay[own][by_channel ? i : 0];
            for (int j = 0; j < 2; j++) {
                const v16 s = w->s[i][j] * decay;
                w->s[i][j] = s;
                known[i & 1][j] += s * k[i];
            }
        }
        for (int j = 0; j < 2; j++) more[j] = (*(v16 *)(value + 16 * j) - (known[0][j] + known[1][j])) * w->beta[own];
        if (!job->out) {
            for (int64_t i = 0; i < job->nk; i++)
                for (int j = 0; j < 2; j++) w->s[i][j] += k[i] * more[j];
            continue;
        }
        for (int64_t i = 0; i < job->nk; i++)
            for (int j = 0; j < 2; j++) {
                const v16 s = w->s[i][j] + k[i] * more[j];
                w->s[i][j] = s;
                seen[i & 1][j] += s * q[i];
            }
        const int64_t at = ((b * job->l + t + own) * job->h + h) * job->nv + first;
        for (int j = 0; j < 2; j++) {
            const v16 sum = seen[0][j] + seen[1][j];
            if (columns == COLUMNS) NAME(put16)(job->out, at + 16 * j, sum, half);
            else for (int64_t i = 16 * j; i < columns && i < 16 * j + 16; i++) put(job->out, at + i, sum[i % 16], half);
        }
    }
    for (int64_t i = 0; i < job->nk; i++) __builtin_memcpy(job->next + head + i * job->nv, w->s[i], (size_t)columns * 4);
}

MX_INLINE TARGET void NAME(delta_head)(const mx_delta_job *job, int64_t b, int64_t h, const int half, const int by_channel) {
    delta_work work, *w = &work;
    const int64_t key = h / (job->h / job->kh);
    for (int64_t t = 0; t < job->l; t += PIECE) {
        const int64_t tokens = job->l - t < PIECE ? job->l - t : PIECE;
        for (int64_t own = 0; own < tokens; own++) {
            const int64_t *qs = job->q_stride, *ks = job->k_stride, *gs = job->g_stride, *bs = job->beta_stride, at = t + own;
            if (job->out) NAME(gather)(job->q, b * qs[0] + at * qs[1] + key * qs[2], qs[3], job->nk, w->q[own], job->eps, job->scale, half);
            NAME(gather)(job->k, b * ks[0] + at * ks[1] + key * ks[2], ks[3], job->nk, w->k[own], job->eps, 1.0f, half);
            for (int64_t i = 0; i < (by_channel ? job->nk : 1); i++) w->decay[own][i] = expf(job->g[b * gs[0] + at * gs[1] + h * gs[2] + i * gs[3]]);
            w->beta[own] = get(job->beta, b * bs[0] + at * bs[1] + h * bs[2], (int)job->half_beta);
        }
        for (int64_t first = 0; first < job->nv; first += COLUMNS)
            NAME(delta_columns)(job, w, b, h, t, tokens, first, job->nv - first < COLUMNS ? job->nv - first : COLUMNS, half, by_channel);
    }
}

/* --- state spaces: S <- e^(dt a) S + dt x B'; out = S C + d x, of a row of S after the other ------------------------------------------------ */

MX_INLINE TARGET void NAME(space_head)(const mx_space_job *job, int64_t b, int64_t h, const int half) {
    space_work work, *w = &work;
    const int64_t group = h / (job->h / job->g), room = (job->n + 15) & ~15, *xs = job->x_stride;
    for (int64_t t = 0; t < job->l; t += PIECE) {
        const int64_t tokens = job->l - t < PIECE ? job->l - t : PIECE;
        const float *from = t ? job->next : job->state;
        for (int64_t own = 0; own < tokens; own++) {
            const int64_t at = t + own, *bs = job->b_stride, *cs = job->c_stride;
            NAME(gather)(job->bm, b * bs[0] + at * bs[1] + group * bs[2], bs[3], job->n, w->b[own], -1.0f, 1.0f, half);
            if (job->out) NAME(gather)(job->cm, b * cs[0] + at * cs[1] + group * cs[2], cs[3], job->n, w->c[own], -1.0f, 1.0f, half);
            w->step[own] = job->dt[(b * job->l + at) * job->h + h];
            w->decay[own] = expf(w->step[own] * job->a[h]);
        }
        for (int64_t p = 0; p < job->p; p++) {
            const int64_t row = ((b * job->h + h) * job->p + p) * job->n;
            w->s[job->n / 16] = (v16){0};
            if (from) __builtin_memcpy(w->s, from + row, (size_t)job->n * 4);
            else __builtin_memset(w->s, 0, (size_t)room * 4);
            for (int64_t own = 0; own < tokens; own++) {
                const float x = get(job->x, b * xs[0] + (t + own) * xs[1] + h * xs[2] + p * xs[3], half), in = x * w->step[own], decay = w->decay[own];
                v16 sums[2] = {{0}};
                if (!job->out) {
                    for (int64_t i = 0; i < room / 16; i++) w->s[i] = w->s[i] * decay + in * *(v16 *)(w->b[own] + 16 * i);
                    continue;
                }
                for (int64_t i = 0; i < room / 16; i++) {
                    w->s[i] = w->s[i] * decay + in * *(v16 *)(w->b[own] + 16 * i);
                    sums[i & 1] += w->s[i] * *(v16 *)(w->c[own] + 16 * i);
                }
                const float sum = NAME(sum16)(sums[0] + sums[1]);
                put(job->out, ((b * job->l + t + own) * job->h + h) * job->p + p, job->d ? sum + job->d[h] * x : sum, half);
            }
            __builtin_memcpy(job->next + row, w->s, (size_t)job->n * 4);
        }
    }
}

/* --- convolutions over the last `taps` inputs of each channel, zeros before the first --------------------------------------------------------- */

/* e^x for x <= 0, as expw in lanes.h. */
MX_INLINE TARGET v16 NAME(exp_below)(v16 x) {
    const v16i visible = x > -87.0f;
    x = (v16)((v16i)x & visible);
    const v16 shifted = x * 1.44269504f + 12582912.0f, n = shifted - 12582912.0f, r = x - n * 0.693359375f - n * -2.12194440e-4f, square = r * r;
    v16 p = (r * 1.9875691500e-4f + 1.3981999507e-3f) * square + (r * 8.3334519073e-3f + 4.1665795894e-2f);
    p = p * square + (r * 1.6666665459e-1f + 5.0000001201e-1f);
    p = p * square + r + 1.0f;
    return (v16)(((v16i)p + ((v16i)shifted << 23)) & visible);
}

/* Sixteen channels from c on; `count` of them are there. */
MX_INLINE TARGET void NAME(conv_channels)(const mx_conv_job *job, int64_t b, int64_t c, int64_t count, const int half) {
    const int64_t taps = job->taps, size = half ? 2 : 4;
    float weights[TAPS][16] = {{0}}, bias[16] = {0};
    v16 seen[TAPS]; /* the last inputs, a ring */
    for (int64_t j = 0; j < count; j++) {
        for (int64_t i = 0; i < taps; i++) weights[i][j] = get(job->weight, (c + j) * taps + i, half);
        if (job->bias) bias[j] = get(job->bias, c + j, half);
    }
    for (int64_t i = 0; i < taps; i++) seen[i] = (v16){0};
    for (int64_t t = 0; t < job->t; t++) {
        const int64_t from = b * job->x_stride[0] + t * job->x_stride[1] + c, to = (b * job->t + t) * job->c + c;
        v16 x = {0}, y, made;
        if (count == 16) x = NAME(get16)(job->x, from, half);
        else for (int64_t j = 0; j < count; j++) x[j] = get(job->x, from + j, half);
        for (int64_t i = 0; i + 1 < taps; i++) seen[i] = seen[i + 1];
        seen[taps - 1] = x;
        y = *(v16 *)bias;
        for (int64_t i = 0; i < taps; i++) y += *(v16 *)weights[i] * seen[i];
        if (half) y = NAME(rounded)(y);
        if (job->silu) {
            const v16i below = y < 0.0f;
            const v16 e = NAME(exp_below)((v16)((v16i)y | INT32_MIN));
            y *= (v16)(((v16i)e & below) | ((v16i)((v16){0} + 1.0f) & ~below)) / (1.0f + e);
        }
        NAME(put16)(&made, 0, y, half);
        __builtin_memcpy((char *)job->out + to * size, &made, (size_t)(count * size));
    }
}

TARGET static void NAME(delta)(const mx_delta_job *job, int64_t b, int64_t h) {
    if (job->g_stride[3]) {
        if (job->half) NAME(delta_head)(job, b, h, 1, 1);
        else NAME(delta_head)(job, b, h, 0, 1);
    } else {
        if (job->half) NAME(delta_head)(job, b, h, 1, 0);
        else NAME(delta_head)(job, b, h, 0, 0);
    }
}

TARGET static void NAME(space)(const mx_space_job *job, int64_t b, int64_t h) {
    if (job->half) NAME(space_head)(job, b, h, 1);
    else NAME(space_head)(job, b, h, 0);
}

TARGET static void NAME(conv)(const mx_conv_job *job, int64_t b, int64_t c) {
    const int64_t count = job->c - c < 16 ? job->c - c : 16;
    if (job->half) NAME(conv_channels)(job, b, c, count, 1);
    else NAME(conv_channels)(job, b, c, count, 0);
}
