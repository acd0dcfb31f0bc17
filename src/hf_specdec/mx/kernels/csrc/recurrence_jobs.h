/* What the recurrences of layers that carry states are told (recurrence.c). Strides are counted in numbers. */
#ifndef MX_RECURRENCE_JOBS_H
#define MX_RECURRENCE_JOBS_H

#include <stdint.h>

typedef struct {
    const void *q, *k, *v, *beta; /* [B, L, KH, K], [B, L, KH, K], [B, L, H, V], [B, L, H] */
    const float *g;               /* [B, L, H], or [B, L, H, K]: the logarithm of what is left of a state */
    const float *state;           /* [B, H, K, V]; NULL: zeros */
    float *next;                  /* the state after the last token */
    void *out;                    /* [B, L, H, V]; NULL: the state is all that is asked for, and q is not read */
    int64_t b, l, kh, h, nk, nv;
    int64_t q_stride[4], k_stride[4], v_stride[4], beta_stride[3], g_stride[4]; /* g: the last one 0 for a gate a head */
    int64_t half, half_beta, path;
    float scale, eps; /* of q; of the norms of q and k, below 0 for none */
} mx_delta_job;

typedef struct {
    const void *x, *bm, *cm;      /* [B, L, H, P], [B, L, G, N], [B, L, G, N] */
    const float *dt, *a, *d;      /* [B, L, H], [H], [H] or NULL: time steps, (negative) decays, what of x is added */
    const float *state;           /* [B, H, P, N]; NULL: zeros */
    float *next;
    void *out;                    /* [B, L, H, P]; NULL: the state is all that is asked for, and cm is not read */
    int64_t b, l, h, g, p, n;
    int64_t x_stride[4], b_stride[4], c_stride[4];
    int64_t half, path;
} mx_space_job;

typedef struct {
    const void *x, *weight, *bias; /* [B, T, C], side by side along C; [C, taps]; [C] or NULL */
    void *out;                     /* [B, T, C] */
    int64_t b, c, t, taps;
    int64_t x_stride[2];
    int64_t half, silu, path;
} mx_conv_job;

void mx_delta(const mx_delta_job *job, int threads);
void mx_space(const mx_space_job *job, int threads);
void mx_conv(const mx_conv_job *job, int threads);

#endif
