/* The kernel library of hf_specdec.mx: a plain C interface, loaded with ctypes.
 *
 * Layout. Weights [N, K] lie in tiles of 16 rows by one MX block of 32 inputs; the tiles of a row group follow one another
 * along K. A tile is 16 vectors of 32 words of 16 bits. Word 2 * row + parity of vector v holds the code of that row and of
 * input 2 * v + parity: read as 32-bit lanes, a vector is 16 rows times an adjacent pair of inputs, which is what a bfloat16
 * dot-product instruction takes, and no lane ever has to be summed with another. Codes narrower than a word are packed
 * vector over vector (pack_half in tiles.c); a tile has as many bytes as its codes have in the stored order. float32 weights lie otherwise:
 * vector i of 32 holds the 16 rows' weights of input i.
 * Scales: 16 bytes a tile, one per row, in an array of their own.
 */
#ifndef HF_SPECDEC_MX_H
#define HF_SPECDEC_MX_H

#include <stddef.h>
#include <stdint.h>

#define MX_BLOCK 32
#define MX_ROWS 16
#define MX_INLINE static inline __attribute__((always_inline))

enum mx_format { MX_E4M3, MX_E5M2, MX_E3M2, MX_E2M3, MX_E2M1, MX_INT8, MX_BF16, MX_FP32 };
enum mx_dtype { MX_DT_F32, MX_DT_BF16, MX_DT_F16 };
enum mx_path { MX_PORTABLE, MX_NEON, MX_AVX2, MX_AVX512F, MX_AVX512_BF16, MX_AMX, MX_PATHS, MX_AMX_ROW = MX_PATHS /* of MX_AMX, without tiles: chosen within */ };

int mx_has_path(int path);

typedef struct {
    const uint8_t *codes, *scales;           /* the full row groups */
    const uint8_t *tail_codes, *tail_scales; /* one more group, filled up with zeros, if N is no multiple of 16 */
    const float *bias;                       /* [N], or NULL */
    const float *values;                     /* [256]: what each code is worth before its scale */
    int64_t n, k;
    int32_t format, bits;
    int32_t integers; /* x is rounded to MXINT8 before the product: for E2M3, E2M1 and INT8 */
} mx_layer;

/* One stretch of row groups times m rows of x; x is packed: integers (integers.h), bfloat16 (MX_AVX512_BF16: mx_pack_pairs, MX_AMX: mx_pack_blocks), float32 (MX_AVX512F: mx_pack_floats);
 * else, and for float32 weights, it is float32 of which a row and a block begin x_row and x_block numbers after the one before. */
typedef struct {
    const mx_layer *layer;
    const void *x;
    int64_t x_row, x_block;
    void *out; /* [m, n] of out_dtype */
    int64_t m;
    int out_dtype;
    uint16_t table[128]; /* the values of the codes (without their sign, if they have 8 bits) as bfloat16, repeated */
} mx_job;

/* x as a path takes it: as it was given, or in memory of its own, which is the caller's to free. */
typedef struct {
    const void *x;
    void *own;
    int64_t row, block; /* as mx_job's */
    int path;           /* which may not be the one that was asked for */
} mx_input;

/* Attention: q [batch, heads, queries, dk], k and v [batch, kv_heads, slots, dk or dv], mask [batch, heads, queries, slots], each
 * with its strides, in elements; the last dimension of q, k and v is contiguous. */
typedef struct {
    const void *q, *k, *v, *mask; /* mask: NULL for none */
    const float *sinks;           /* [heads]: one more score per head, which has no value; or NULL */
    void *out;                    /* [batch, queries, heads, dv] */
    int64_t batch, heads, kv_heads, queries, slots, dk, dv;
    int64_t q_stride[3], k_stride[3], v_stride[3], mask_stride[4];
    int64_t dtype, mask_dtype, causal; /* mask_dtype: an mx_dtype, or another number for bytes (0 hides); causal: without a mask */
    float scale, softcap, nothing;     /* softcap 0: none; a mask of at most `nothing` hides */
} mx_attention;

/* out[i] [m, n_i] = x [m, k] @ W_i^T + bias_i; attention. Both return 0, or 1 for no memory. */
int mx_linears(const mx_layer *const *layers, void *const *outs, int count, const void *x, int64_t m, int dtype, int path, int threads);
int mx_attention_rows(const mx_attention *a, int path, int threads);

typedef void (*mx_run)(const mx_job *, int64_t first_group, int64_t last_group);

/* The parts that products are made of: x [m, k] for a layer, and others that take it alike (1: no memory), what a layer does to it, and how many row groups make a piece of work. */
int mx_make_input(mx_input *in, const mx_layer *layer, const void *x, int64_t m, int dtype, int path, int threads);
mx_run mx_make_job(mx_job *job, const mx_layer *layer, const mx_input *in, void *out, int64_t m, int dtype);
int64_t mx_piece_groups(int64_t groups, int64_t m, int path, int threads);

void mx_run_portable(const mx_job *, int64_t, int64_t);
void mx_run_neon(const mx_job *, int64_t, int64_t);
void mx_run_avx2(const mx_job *, int64_t, int64_t);
void mx_run_avx512f(const mx_job *, int64_t, int64_t);
void mx_run_avx512_vbmi2(const mx_job *, int64_t, int64_t);
void mx_run_avx512_bf16(const mx_job *, int64_t, int64_t);
void mx_run_amx(const mx_job *, int64_t, int64_t);
void mx_run_amx_many(const mx_job *, int64_t, int64_t);
void mx_run_amx_row(const mx_job *, int64_t, int64_t);
void mx_run32_portable(const mx_job *, int64_t, int64_t);
void mx_run32_neon(const mx_job *, int64_t, int64_t);
void mx_run32_avx2(const mx_job *, int64_t, int64_t);
void mx_run32_avx512(const mx_job *, int64_t, int64_t);
#define MX_AMX_GROUPS 20 /* row groups that are then decoded at once */
#define MX_AMX_MANY 64 /* rows of x above which weights are decoded once for all of them */
int mx_has_amx(int bytes);
int mx_is_tiny(const uint16_t *x, int64_t k);
void mx_pack_blocks(const void *x, void *packed, int64_t chunk, int64_t m, int64_t k);
void mx_pack_pairs(const uint32_t *x, uint32_t *packed, int64_t chunk, int64_t m, int64_t k);
void mx_pack_floats(const void *x, int dtype, float *packed, int64_t chunk, int64_t m, int64_t k);

/* What multiplies on the paths of AVX-512 (products.c): fused multiply-adds, the same where codes are looked up by VBMI2, or dot products of bfloat16. */
enum mx_products { MX_FUSED, MX_FUSED_VBMI2, MX_DOTS };
int mx_product_kind(int path);

/* Layers whose activations are rounded, by one set of instructions: what packs chunk `chunk` of x (integers.h), and the product. */
typedef struct {
    void (*pack)(const void *x, int dtype, int32_t *packed, int64_t chunk, int64_t m, const mx_layer *layer);
    mx_run product;
} mx_integers;

#if !defined(__x86_64__) || defined(MX_NO_AVX_VNNI) /* the latter where the assembler is older than the compiler: build.py */
#elif defined(__apple_build_version__) ? __clang_major__ >= 13 : defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11
#define MX_AVX_VNNI /* the compiler knows it */
#endif
#if defined(MX_AVX_VNNI) && defined(__linux__)
#define MX_AMX_KNOWN
#endif
const mx_integers *mx_integers_of(int path); /* NULL on the portable path */
extern const mx_integers mx_integers_neon, mx_integers_avx2, mx_integers_avx2_vnni, mx_integers_avx512vl_vnni, mx_integers_avx512_vnni, mx_integers_amx;

MX_INLINE int64_t mx_tile_bytes(int bits) { return MX_ROWS * MX_BLOCK * bits / 8; }

MX_INLINE const uint8_t *mx_group_codes(const mx_layer *l, int64_t group) {
    return group < l->n / MX_ROWS ? l->codes + group * (l->k / MX_BLOCK) * mx_tile_bytes(l->bits) : l->tail_codes;
}

MX_INLINE const uint8_t *mx_group_scales(const mx_layer *l, int64_t group) {
    return group < l->n / MX_ROWS ? l->scales + group * (l->k / MX_BLOCK) * MX_ROWS : l->tail_scales;
}

MX_INLINE float mx_from_bits(uint32_t bits) {
    float value;
    __builtin_memcpy(&value, &bits, 4);
    return value;
}

MX_INLINE uint32_t mx_bits(float value) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, 4);
    return bits;
}

/* E8M0: 2^(b - 127); byte 0 is a subnormal; NaN (0xFF) never reaches a kernel: such layers are dequantised. */
MX_INLINE float mx_scale(uint8_t b) { return mx_from_bits(b ? (uint32_t)b << 23 : 1u << 22); }

/* MXINT8, scale rule "even": the scale byte of a block whose largest magnitude has these bits, if it is finite. */
MX_INLINE uint32_t mx_integer_scale(uint32_t amax) {
    const uint32_t byte = (amax + (1u << 16)) >> 23;
    return byte < 254 ? byte : 254;
}

/* Weights as integers: the unit they count, and what is added to make them positive. */
MX_INLINE float mx_weight_unit(const mx_layer *l) { return l->bits == 4 ? 0.5f : l->bits == 6 ? 0.125f : 0x1p-6f; }
MX_INLINE int mx_offset(const mx_layer *l) { return l->bits == 4 ? 16 : l->bits == 6 ? 64 : 128; }

MX_INLINE uint16_t mx_to_bf16(float value) {
    uint32_t bits = mx_bits(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

uint16_t mx_to_f16(float value);
float mx_from_f16(uint16_t bits);

/* Store `count` results of row m, from output `first` on. */
MX_INLINE void mx_store(const mx_job *job, int64_t m, int64_t first, const float *values, int64_t count) {
    const mx_layer *l = job->layer;
    for (int64_t i = 0; i < count; i++) {
        float y = values[i] + (l->bias ? l->bias[first + i] : 0.0f);
        int64_t at = m * l->n + first + i;
        if (job->out_dtype == MX_DT_F32) ((float *)job->out)[at] = y;
        else if (job->out_dtype == MX_DT_BF16) ((uint16_t *)job->out)[at] = mx_to_bf16(y);
        else ((uint16_t *)job->out)[at] = mx_to_f16(y);
    }
}
#endif
