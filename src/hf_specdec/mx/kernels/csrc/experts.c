/* Products by the experts of one layer: each row of x with the weights of the experts that a router has chosen for it. The rows of an expert are multiplied
 * together, so that its weights are read once; what a row gives is the same bits whatever other rows the expert has. */
#include "experts.h"

#include <stdlib.h>
#include <string.h>

#include "team.h"

typedef struct {
    mx_layer layer;
    mx_input input;
    mx_job job;
    mx_run run;
    int64_t first, rows, piece; /* its first row among the sorted ones, how many, and its first piece of work */
    int failed;
} expert;

typedef struct {
    const mx_experts_job *job;
    expert *expert;
    const int64_t *pair; /* the sorted rows: which pairs of row and expert they are */
    uint8_t *x, *out;    /* the sorted rows, and what they give */
    int64_t active, groups, n, size;
} work;

/* The rows of one expert, one after another, as the kernels take them. */
static void gather(const void *context, int64_t item, int thread) {
    (void)thread;
    const work *w = context;
    const mx_experts_job *job = w->job;
    expert *e = &w->expert[item];
    const mx_layer *layer = &e->layer;
    const int64_t bytes = job->layer->k * w->size;
    for (int64_t i = e->first; i < e->first + e->rows; i++)
        memcpy(w->x + i * bytes, (const uint8_t *)job->x + w->pair[i] / job->share * bytes, (size_t)bytes);
    e->failed = mx_make_input(&e->input, layer, w->x + e->first * bytes, e->rows, (int)job->dtype, (int)job->path, 1);
    if (!e->failed) e->run = mx_make_job(&e->job, layer, &e->input, w->out + e->first * w->n * w->size, e->rows, (int)job->dtype);
}

static void piece(const void *context, int64_t item, int thread) {
    (void)thread;
    const work *w = context;
    int64_t low = 0, high = w->active - 1; /* the last expert whose first piece is at most this one */
    while (low < high) {
        const int64_t middle = (low + high + 1) / 2;
        if (w->expert[middle].piece <= item) low = middle; else high = middle - 1;
    }
    const expert *e = &w->expert[low];
    const int64_t groups = w->n / MX_ROWS, at = (item - e->piece) * w->groups;
    e->run(&e->job, at, at + w->groups < groups ? at + w->groups : groups);
}

/* Where each expert's rows begin among the sorted ones, [experts + 1]; pairs without an expert are left out. */
static void sort(const mx_experts_job *job, int64_t *first, int64_t *pair) {
    for (int64_t i = 0; i < job->pairs; i++)
        if (job->index[i] >= 0 && job->index[i] < job->experts) first[job->index[i] + 1]++;
    for (int64_t e = 0; e < job->experts; e++) first[e + 1] += first[e];
    for (int64_t i = 0; i < job->pairs; i++)
        if (job->index[i] >= 0 && job->index[i] < job->experts) pair[first[job->index[i]]++] = i;
    for (int64_t e = job->experts; e > 0; e--) first[e] = first[e - 1];
    first[0] = 0;
}

static mx_layer layer_of(const mx_layer *all, int64_t n, int64_t number) {
    const int64_t tiles = number * (n / MX_ROWS) * (all->k / MX_BLOCK);
    mx_layer own = *all;
    own.n = n, own.codes += tiles * mx_tile_bytes(all->bits);
    if (own.scales) own.scales += tiles * MX_ROWS;
    return own;
}

int mx_experts(const mx_experts_job *job, int threads) {
    const int64_t n = job->layer->n / job->experts, size = job->dtype == MX_DT_F32 ? 4 : 2;
    int64_t *first = calloc((size_t)(job->experts + 1 + job->pairs), sizeof(int64_t)), *pair = first + job->experts + 1;
    work w = {.job = job, .pair = pair, .n = n, .size = size};
    int failed = !first;
    if (!failed) {
        sort(job, first, pair);
        const int64_t rows = first[job->experts];
        w.expert = calloc((size_t)(job->experts < job->pairs ? job->experts : job->pairs) + 1, sizeof(expert));
        w.x = malloc((size_t)(rows * size * (job->layer->k + n)) + 1), w.out = w.x + rows * size * job->layer->k;
        failed = !w.expert || !w.x;
    }
    for (int64_t e = 0; !failed && e < job->experts; e++)
        if (first[e + 1] > first[e])
            w.expert[w.active++] = (expert){.layer = layer_of(job->layer, n, e), .first = first[e], .rows = first[e + 1] - first[e]};
    if (!failed && w.active) {
        const int64_t rows = first[job->experts];
        mx_share(gather, &w, w.active, rows > 32 ? threads : 1);
        for (int64_t i = 0; i < w.active; i++) failed |= w.expert[i].failed;
        w.groups = mx_piece_groups(n / MX_ROWS * w.active, rows / w.active, (int)job->path, threads);
        const int64_t pieces = (n / MX_ROWS + w.groups - 1) / w.groups;
        for (int64_t i = 0; i < w.active; i++) w.expert[i].piece = i * pieces;
        if (!failed) mx_share(piece, &w, w.active * pieces, threads);
        for (int64_t i = 0; i < w.active; i++) free(w.expert[i].input.own);
        if (!failed && rows < job->pairs) memset(job->out, 0, (size_t)(job->pairs * n * size));
        for (int64_t i = 0; !failed && i < rows; i++)
            memcpy((uint8_t *)job->out + pair[i] * n * size, w.out + i * n * size, (size_t)(n * size));
    } else if (!failed) {
        memset(job->out, 0, (size_t)(job->pairs * n * size));
    }
    free(first), free(w.expert), free(w.x);
    return failed;
}
