/* The products, attention and recurrences as the C++ code that torch's compiler writes calls them: with handles of tensors, without Python in
 * between. The functions for handles are torch's own C interface (torch/csrc/inductor/aoti_torch/c/shim.h), given by address, so that
 * nothing of torch is needed to build this. */
#include <math.h>

#ifdef _OPENMP
int omp_get_max_threads(void); /* Apple's compiler has no omp.h */
#else
static int omp_get_max_threads(void) { return 1; }
#endif

#include "experts.h"
#include "recurrence_jobs.h"
#include "team.h"

typedef void *tensor;
static struct {
    int32_t (*data)(tensor, void **);
    int32_t (*dim)(tensor, int64_t *);
    int32_t (*sizes)(tensor, int64_t **);
    int32_t (*strides)(tensor, int64_t **);
    int32_t (*dtype)(tensor, int32_t *);
    int32_t (*empty)(int64_t, const int64_t *, const int64_t *, int32_t, int32_t, int32_t, tensor *);
    int32_t dtypes[3], truth, whole, cpu; /* torch's numbers: of the dtypes in the order of mx_dtype, of bool, of int64, of the device */
    int path;
} torch;

void mx_torch(void *const *functions, const int32_t *numbers) {
    __builtin_memcpy(&torch, functions, 6 * sizeof(void *));
    __builtin_memcpy(torch.dtypes, numbers, 6 * sizeof(int32_t));
}

void mx_set_path(int path) { torch.path = path; }

#define MOST 8 /* dimensions */
typedef struct {
    void *data;
    int64_t dim, *sizes, *strides;
    int dtype; /* an mx_dtype; 3 for bool, 4 for int64, -1 for another */
} view;

static int look(tensor handle, view *v) {
    int32_t dtype;
    if (torch.data(handle, &v->data) || torch.dim(handle, &v->dim) || torch.sizes(handle, &v->sizes) ||
        torch.strides(handle, &v->strides) || torch.dtype(handle, &dtype))
        return 1;
    v->dtype = dtype == torch.truth ? 3 : dtype == torch.whole ? 4 : -1;
    for (int i = 0; i < 3; i++)
        if (dtype == torch.dtypes[i]) v->dtype = i;
    return v->dtype < 0 || v->dim > MOST;
}

static int contiguous(const view *v) {
    int64_t step = 1;
    for (int64_t i = v->dim - 1; i >= 0; step *= v->sizes[i--])
        if (v->sizes[i] != 1 && v->strides[i] != step) return 0;
    return 1;
}

static int fresh(const int64_t *sizes, int64_t dim, int dtype, tensor *out, void **data) {
    int64_t strides[MOST], step = 1;
    for (int64_t i = dim - 1; i >= 0; step *= sizes[i--]) strides[i] = step;
    return torch.empty(dim, sizes, strides, torch.dtypes[dtype], torch.cpu, 0, out) || torch.data(*out, data);
}

static int32_t products(tensor x, tensor table, const int64_t *places, const int64_t *features, int count, tensor *const *outs) {
    view v;
    void *start, *data[MX_MANY];
    const mx_layer *layers[MX_MANY];
    int64_t sizes[MOST], rows = 1;
    if (look(x, &v) || v.dtype >= 3 || !contiguous(&v) || torch.data(table, &start)) return 1;
    for (int64_t i = 0; i < v.dim; i++) sizes[i] = v.sizes[i];
    for (int64_t i = 0; i < v.dim - 1; i++) rows *= sizes[i];
    for (int i = 0; i < count; i++) {
        layers[i] = (const mx_layer *)start + places[i];
        sizes[v.dim - 1] = features[i];
        if (fresh(sizes, v.dim, v.dtype, outs[i], &data[i])) return 1;
    }
    return rows ? mx_linears(layers, data, count, v.data, rows, v.dtype, torch.path, omp_get_max_threads()) : 0;
}

int32_t aoti_torch_cpu_mx_tiles(tensor x, tensor layers, int64_t i, int64_t n, tensor *out) {
    return products(x, layers, &i, &n, 1, &out);
}

int32_t aoti_torch_cpu_mx_tiles2(tensor x, tensor layers, int64_t i0, int64_t i1, int64_t n0, int64_t n1, tensor *out0, tensor *out1) {
    return products(x, layers, (int64_t[]){i0, i1}, (int64_t[]){n0, n1}, 2, (tensor *[]){out0, out1});
}

int32_t aoti_torch_cpu_mx_tiles3(tensor x, tensor layers, int64_t i0, int64_t i1, int64_t i2, int64_t n0, int64_t n1, int64_t n2,
                                 tensor *out0, tensor *out1, tensor *out2) {
    return products(x, layers, (int64_t[]){i0, i1, i2}, (int64_t[]){n0, n1, n2}, 3, (tensor *[]){out0, out1, out2});
}

/* x [rows, K], index int64 [.., S] for all rows, or for each of the S shares of them: as kernels.experts.multiply. */
int32_t aoti_torch_cpu_mx_experts(tensor x, tensor table, int64_t i, int64_t experts, tensor index, int64_t n, tensor *out) {
    view v, chosen;
    void *start, *data;
    if (look(x, &v) || v.dtype >= 3 || v.dim != 2 || !contiguous(&v) || look(index, &chosen) || chosen.dtype != 4 || !contiguous(&chosen)) return 1;
    int64_t pairs = 1;
    for (int64_t d = 0; d < chosen.dim; d++) pairs *= chosen.sizes[d];
    const int64_t sizes[2] = {pairs, n};
    if (torch.data(table, &start) || fresh(sizes, 2, v.dtype, out, &data)) return 1;
    const mx_experts_job job = {.layer = (const mx_layer *)start + i, .x = v.data, .index = chosen.data, .out = data, .experts = experts, .pairs = pairs,
                                .share = v.sizes[0] ? pairs / v.sizes[0] : 1, .dtype = v.dtype, .path = torch.path};
    return pairs ? mx_experts(&job, omp_get_max_threads()) : 0;
}

/* query [B, H, Q, D], key and value [B, G, S, D], mask broadcastable to [B, H, Q, S]: as attention.rows_attention, of one dtype. */
int32_t aoti_torch_cpu_rows_attention(tensor query, tensor key, tensor value, tensor *mask, double scale, int32_t causal, double softcap,
                                      tensor *sinks, tensor *out) {
    view q, k, v, m, s;
    if (look(query, &q) || look(key, &k) || look(value, &v) || q.dtype >= 3 || k.dtype != q.dtype || v.dtype != q.dtype) return 1;
    if (q.strides[3] != 1 || k.strides[3] != 1 || v.strides[3] != 1) return 1;
    if (sinks && (look(*sinks, &s) || s.dtype != MX_DT_F32 || !contiguous(&s))) return 1;
    mx_attention a = {.q = q.data, .k = k.data, .v = v.data, .sinks = sinks ? s.data : NULL, .batch = q.sizes[0], .heads = q.sizes[1],
                      .kv_heads = k.sizes[1], .queries = q.sizes[2], .slots = k.sizes[2], .dk = q.sizes[3], .dv = v.sizes[3],
                      .dtype = q.dtype, .causal = causal && !mask, .scale = (float)scale, .softcap = (float)softcap, .nothing = -1e38f};
    for (int i = 0; i < 3; i++) a.q_stride[i] = q.strides[i], a.k_stride[i] = k.strides[i], a.v_stride[i] = v.strides[i];
    if (mask) {
        const int64_t shape[4] = {a.batch, a.heads, a.queries, a.slots};
        static const float half[3] = {-1.7014117e38f, -1.6947657e38f, -32752.0f}; /* half the smallest number of each dtype */
        if (look(*mask, &m) || m.dim > 4 || m.dtype > 3) return 1;
        a.mask = m.data, a.mask_dtype = m.dtype;
        if (m.dtype < 3) a.nothing = half[m.dtype];
        for (int64_t i = 0; i < m.dim; i++) {
            const int64_t own = m.sizes[m.dim - 1 - i], wanted = shape[3 - i];
            if (own < wanted && own != 1) return 1;
            a.mask_stride[3 - i] = own == 1 ? 0 : m.strides[m.dim - 1 - i];
        }
    }
    const int64_t sizes[4] = {a.batch, a.queries, a.heads, a.dv};
    if (fresh(sizes, 4, q.dtype, out, &a.out)) return 1;
    return mx_attention_rows(&a, torch.path, omp_get_max_threads());
}

static void strides(int64_t *into, const view *v) {
    for (int64_t i = 0; i < v->dim; i++) into[i] = v->strides[i];
}

/* Whether a tensor is there as a kernel wants it: of `dim` dimensions, and of the dtype, or with -1 of float32 or bfloat16. */
static int is(tensor handle, int64_t dim, int dtype, view *v) {
    return !look(handle, v) && v->dim == dim && (dtype < 0 ? v->dtype == MX_DT_F32 || v->dtype == MX_DT_BF16 : v->dtype == dtype);
}

/* The data of a contiguous float32 tensor that need not be there; *fine is 0 if it is otherwise. */
static const float *numbers(tensor *handle, int64_t dim, int *fine) {
    view v;
    if (!handle) return NULL;
    if (is(*handle, dim, MX_DT_F32, &v) && contiguous(&v)) return v.data;
    *fine = 0;
    return NULL;
}

/* query, key [B, L, KH, K], value [B, L, H, V], gate float32 [B, L, H] or [B, L, H, K], beta [B, L, H], state float32 [B, H, K, V]: as kernels.recurrence.delta_rule. */
int32_t aoti_torch_cpu_mx_delta(tensor query, tensor key, tensor value, tensor gate, tensor beta, tensor *state, int32_t norm, tensor *out, tensor *after) {
    view q, k, v, g, b;
    int fine = 1;
    if (!is(value, 4, -1, &v) || !is(query, 4, v.dtype, &q) || !is(key, 4, v.dtype, &k) || !is(beta, 3, -1, &b)) return 1;
    if (look(gate, &g) || g.dtype != MX_DT_F32 || g.dim < 3 || g.dim > 4) return 1;
    mx_delta_job job = {.q = q.data, .k = k.data, .v = v.data, .beta = b.data, .g = g.data, .state = numbers(state, 4, &fine), .b = v.sizes[0], .l = v.sizes[1],
                        .kh = k.sizes[2], .h = v.sizes[2], .nk = k.sizes[3], .nv = v.sizes[3], .half = v.dtype == MX_DT_BF16, .half_beta = b.dtype == MX_DT_BF16,
                        .path = torch.path, .scale = (float)(1 / sqrt((double)k.sizes[3])), .eps = norm ? 1e-6f : -1};
    const int64_t next[4] = {job.b, job.h, job.nk, job.nv};
    strides(job.q_stride, &q), strides(job.k_stride, &k), strides(job.v_stride, &v), strides(job.beta_stride, &b), strides(job.g_stride, &g);
    if (!fine || fresh(v.sizes, 4, v.dtype, out, &job.out) || fresh(next, 4, MX_DT_F32, after, (void **)&job.next)) return 1;
    mx_delta(&job, omp_get_max_threads());
    return 0;
}

/* x [B, L, H, P], step float32 [B, L, H], decay float32 [H], b and c [B, L, G, N], skip float32 [H], state float32 [B, H, P, N]: as kernels.recurrence.state_space. */
int32_t aoti_torch_cpu_mx_space(tensor x, tensor step, tensor decay, tensor b, tensor c, tensor *skip, tensor *state, tensor *out, tensor *after) {
    view v, bm, cm;
    int fine = 1;
    if (!is(x, 4, -1, &v) || !is(b, 4, v.dtype, &bm) || !is(c, 4, v.dtype, &cm)) return 1;
    mx_space_job job = {.x = v.data, .bm = bm.data, .cm = cm.data, .dt = numbers(&step, 3, &fine), .a = numbers(&decay, 1, &fine), .d = numbers(skip, 1, &fine),
                        .state = numbers(state, 4, &fine), .b = v.sizes[0], .l = v.sizes[1], .h = v.sizes[2], .g = bm.sizes[2], .p = v.sizes[3], .n = bm.sizes[3],
                        .half = v.dtype == MX_DT_BF16, .path = torch.path};
    const int64_t next[4] = {job.b, job.h, job.p, job.n};
    strides(job.x_stride, &v), strides(job.b_stride, &bm), strides(job.c_stride, &cm);
    if (!fine || fresh(v.sizes, 4, v.dtype, out, &job.out) || fresh(next, 4, MX_DT_F32, after, (void **)&job.next)) return 1;
    mx_space(&job, omp_get_max_threads());
    return 0;
}

/* x [B, T, C], weight [C, taps], bias [C]: as kernels.recurrence.convolved. */
int32_t aoti_torch_cpu_mx_conv(tensor x, tensor weight, tensor *bias, int32_t silu, tensor *out) {
    view v, w, b = {0};
    if (!is(x, 3, -1, &v) || v.strides[2] != 1 || !is(weight, 2, v.dtype, &w) || !contiguous(&w)) return 1;
    if (bias && (!is(*bias, 1, v.dtype, &b) || !contiguous(&b))) return 1;
    mx_conv_job job = {.x = v.data, .weight = w.data, .bias = b.data, .b = v.sizes[0], .c = v.sizes[2], .t = v.sizes[1], .taps = w.sizes[1],
                       .x_stride = {v.strides[0], v.strides[1]}, .half = v.dtype == MX_DT_BF16, .silu = silu, .path = torch.path};
    if (fresh(v.sizes, 3, v.dtype, out, &job.out)) return 1;
    mx_conv(&job, omp_get_max_threads());
    return 0;
}
