#ifndef HF_SPECDEC_EXPERTS_H
#define HF_SPECDEC_EXPERTS_H

#include "mx.h"

/* out[i] [n] = W[index[i]] x[i / share] for pairs of a row and an expert, i = 0 .. pairs - 1, where W[e] [n, k] are n = layer->n / experts rows of the layer's, a
 * multiple of MX_ROWS. A pair whose index is no expert's gives zeros. */
typedef struct {
    const mx_layer *layer;
    const void *x;
    const int64_t *index;
    void *out;
    int64_t experts, pairs, share, dtype, path;
} mx_experts_job;

/* Returns 0, or 1 for no memory. */
int mx_experts(const mx_experts_job *job, int threads);
#endif
