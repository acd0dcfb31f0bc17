/* Which instructions this processor has, and one product over all row groups on the threads of the caller's OpenMP. */
#include "team.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#define ABI 13
#define PIECES 4
#define MANY_ROWS 32 /* of x: above, threads share its packing, and every group is a long piece */
int mx_abi(void) { return ABI; }

#if defined(__aarch64__)
#if defined(__linux__)
#include <sys/auxv.h>
static int has_dot_products(void) { return (int)(getauxval(AT_HWCAP) >> 20 & 1); }
#else
static int has_dot_products(void) { return 1; } /* Apple's have them all */
#endif
#endif

int mx_has_path(int path) {
    if (path == MX_PORTABLE) return 1;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (path == MX_AVX2)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    int f = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    if (path == MX_AVX512F) return f;
    if (path == MX_AVX512_BF16)
        return f && __builtin_cpu_supports("avx512vbmi") &&
               __builtin_cpu_supports("avx512vbmi2") && __builtin_cpu_supports("avx512vnni") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bf16");
#ifdef MX_AMX_KNOWN
    if (path == MX_AMX) return mx_has_path(MX_AVX512_BF16) && mx_has_amx(0);
#endif
#elif defined(__aarch64__)
    if (path == MX_NEON) return has_dot_products();
#endif
    return 0;
}

static mx_run runner(int path, int bits, int integers) {
    if (integers && path != MX_PORTABLE) return mx_integers_of(path)->product;
#if defined(__x86_64__)
    if (bits == 32 && path >= MX_AVX2) return path == MX_AVX2 ? mx_run32_avx2 : mx_run32_avx512;
#ifdef MX_AMX_KNOWN
    if (path == MX_AMX) return mx_run_amx;
    if (path == MX_AMX_ROW) return mx_run_amx_row;
#endif
    if (path == MX_AVX512_BF16) return mx_run_avx512_bf16;
    if (path == MX_AVX512F) return mx_product_kind(path) == MX_FUSED ? mx_run_avx512f : mx_run_avx512_vbmi2;
    if (path == MX_AVX2) return mx_run_avx2;
#elif defined(__aarch64__)
    if (path == MX_NEON) return bits == 32 ? mx_run32_neon : mx_run_neon;
#endif
    return bits == 32 ? mx_run32_portable : mx_run_portable;
}

#if defined(__x86_64__)
#include <immintrin.h>
/* Twelve independent chains, so that neither latency nor memory counts; returns the multiply-adds of one round. */
#define TWELVE(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11)
__attribute__((target("avx512f,avx512bf16"), noinline)) static int64_t bf16_loop(int64_t rounds) {
    __m512i one = _mm512_set1_epi16(0x3f80);
    __m512 a[12];
#define BEGIN(i) a[i] = _mm512_setzero_ps();
#define DOT(i) a[i] = _mm512_dpbf16_ps(a[i], (__m512bh)one, (__m512bh)one); __asm__ volatile("" : "+v"(a[i]));
    TWELVE(BEGIN)
    for (int64_t r = 0; r < rounds; r++) { TWELVE(DOT) }
    return 12 * 32;
}

__attribute__((target("avx512f"), noinline)) static int64_t wide_fma_loop(int64_t rounds) {
    __m512 one = _mm512_set1_ps(1.0f);
    __m512 a[12];
    __asm__ volatile("" : "+v"(one)); /* or the compiler adds instead */
    TWELVE(BEGIN)
#define WIDE_FMA(i) a[i] = _mm512_fmadd_ps(one, one, a[i]); __asm__ volatile("" : "+v"(a[i]));
    for (int64_t r = 0; r < rounds; r++) { TWELVE(WIDE_FMA) }
    return 12 * 16;
}

__attribute__((target("avx2,fma"), noinline)) static int64_t fma_loop(int64_t rounds) {
    __m256 one = _mm256_set1_ps(1.0f), a[12];
#define BEGIN8(i) a[i] = _mm256_setzero_ps();
#define FMA(i) a[i] = _mm256_fmadd_ps(one, one, a[i]); __asm__ volatile("" : "+x"(a[i]));
    TWELVE(BEGIN8)
    for (int64_t r = 0; r < rounds; r++) { TWELVE(FMA) }
    return 12 * 8;
}
#elif defined(__aarch64__)
#include <arm_neon.h>
#define SIXTEEN(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11) DO(12) DO(13) DO(14) DO(15)
__attribute__((noinline)) static int64_t fma_loop(int64_t rounds) {
    float32x4_t one = vdupq_n_f32(1.0f), a[16];
#define BEGIN4(i) a[i] = vdupq_n_f32(0.0f);
#define FMA4(i) a[i] = vfmaq_f32(a[i], one, one); __asm__ volatile("" : "+w"(a[i]));
    SIXTEEN(BEGIN4)
    for (int64_t r = 0; r < rounds; r++) { SIXTEEN(FMA4) }
    return 16 * 4;
}
#endif

static int64_t mx_dot_loop(int64_t rounds) {
#if defined(__x86_64__)
    if (mx_has_path(MX_AVX512_BF16) && mx_product_kind(MX_AVX512_BF16) == MX_DOTS) return bf16_loop(rounds);
    if (mx_has_path(MX_AVX512F)) return wide_fma_loop(rounds);
    if (mx_has_path(MX_AVX2)) return fma_loop(rounds);
#elif defined(__aarch64__)
    return fma_loop(rounds);
#endif
    return 0;
}

static double power_of_two(int exponent) {
    const uint64_t bits = (uint64_t)(1023 + exponent) << 52;
    double value;
    memcpy(&value, &bits, 8);
    return value;
}

/* A block of x, rounded to MXINT8 in place: what mx_integers.pack makes, as numbers. */
static void round_block(float *x) {
    uint32_t amax = 0;
    for (int i = 0; i < MX_BLOCK; i++) amax = (mx_bits(x[i]) & 0x7fffffff) > amax ? mx_bits(x[i]) & 0x7fffffff : amax;
    const int exponent = (int)mx_integer_scale(amax) - 127 - 6; /* of the unit */
    for (int i = 0; i < MX_BLOCK; i++) {
        const double scaled = (double)x[i] * power_of_two(-exponent);
        const double whole = scaled + 0x1.8p52 - 0x1.8p52; /* to nearest, ties to even */
        x[i] = amax < 0x7f800000 ? (float)((whole > 127 ? 127 : whole < -127 ? -127 : whole) * power_of_two(exponent)) : mx_from_bits(0x7fc00000);
    }
}

/* x [m, k] in float32, at the places of mx_job; `integers`: rounded to MXINT8. */
static float *widened(const void *x, int dtype, int64_t m, int64_t k, int64_t x_row, int64_t x_block, int integers) {
    float *wide = malloc((size_t)(m * k) * sizeof(float));
    for (int64_t at = 0; wide && at < m * k; at += MX_BLOCK) {
        float *to = wide + at / k * x_row + at % k / MX_BLOCK * x_block;
        const uint16_t *words = (const uint16_t *)x + at;
        if (dtype == MX_DT_F32) memcpy(to, (const float *)x + at, MX_BLOCK * sizeof(float));
        else if (dtype == MX_DT_BF16) for (int i = 0; i < MX_BLOCK; i++) to[i] = mx_from_bits((uint32_t)words[i] << 16);
        else for (int i = 0; i < MX_BLOCK; i++) to[i] = mx_from_f16(words[i]);
        if (integers) round_block(to);
    }
    return wide;
}

typedef struct {
    mx_job job[MX_MANY];
    int64_t first[MX_MANY + 1]; /* the first piece of each */
    mx_run run[MX_MANY];
    int64_t groups;             /* of a piece */
} jobs;

static void piece(const void *context, int64_t item, int thread) {
    (void)thread;
    const jobs *all = context;
    int i = 0;
    while (item >= all->first[i + 1]) i++;
    const int64_t groups = (all->job[i].layer->n + MX_ROWS - 1) / MX_ROWS, at = (item - all->first[i]) * all->groups;
    all->run[i](&all->job[i], at, at + all->groups < groups ? at + all->groups : groups);
}

typedef struct {
    const void *x;
    void *packed;
    int64_t m, k;
    int dtype;
    const mx_layer *integers; /* NULL: pairs of numbers */
    int path;
} packing;

static void pack(const void *context, int64_t chunk, int thread) {
    (void)thread;
    const packing *p = context;
    if (p->integers) mx_integers_of(p->path)->pack(p->x, p->dtype, p->packed, chunk, p->m, p->integers);
#if defined(__x86_64__)
#ifdef MX_AMX_KNOWN
    else if (p->path == MX_AMX) mx_pack_blocks(p->x, p->packed, chunk, p->m, p->k);
#endif
    else if (p->path == MX_AVX512_BF16) mx_pack_pairs(p->x, p->packed, chunk, p->m, p->k);
    else mx_pack_floats(p->x, p->dtype, p->packed, chunk, p->m, p->k);
#endif
}

int mx_make_input(mx_input *in, const mx_layer *layer, const void *x, int64_t m, int dtype, int path, int threads) {
    const int64_t k = layer->k;
    const int integers = layer->integers, whole = layer->bits == 32;
    if (path == MX_AMX && !integers && (whole || dtype != MX_DT_BF16)) path = MX_AVX512_BF16;
#ifdef MX_AMX_KNOWN
    if (path == MX_AMX && m == 1 && !integers && layer->bits < 16 && !mx_is_tiny(x, k)) path = MX_AMX_ROW;
#endif
    if (path == MX_AVX512_BF16 && !integers && (whole || dtype != MX_DT_BF16 || mx_product_kind(path) != MX_DOTS)) path = MX_AVX512F;
    const int wide = (path == MX_AVX512F || path == MX_AMX_ROW) && !whole, packs = integers ? path != MX_PORTABLE : wide || path >= MX_AVX512_BF16;
    /* Rows that lie a power of two apart fall into few places of a cache; block by block they lie together. */
    const int apart = path == MX_AVX2 || path == MX_NEON || path == MX_AMX;
    *in = (mx_input){.x = x, .row = apart ? MX_BLOCK : k, .block = apart ? m * MX_BLOCK : MX_BLOCK, .path = path};
    if (packs && (integers || m > 1 || (wide && dtype != MX_DT_F32))) {
        const int64_t bytes = integers ? m * k / MX_BLOCK * 40 : m * k * (wide ? 4 : 2) + 2 * ((m + 7) / 8);
        in->own = aligned_alloc(64, (size_t)(bytes + 63) / 64 * 64); /* tiles are read line by line */
        if (!in->own) return 1;
        const packing all = {x, in->own, m, k, dtype, integers ? layer : NULL, path};
        mx_share(pack, &all, (m + 7) / 8, m > MANY_ROWS ? threads : 1);
    } else if (!packs && (dtype != MX_DT_F32 || integers || (apart && m > 1))) {
        in->own = widened(x, dtype, m, k, in->row, in->block, integers);
        if (!in->own) return 1;
    }
    if (in->own) in->x = in->own;
    return 0;
}

mx_run mx_make_job(mx_job *job, const mx_layer *layer, const mx_input *in, void *out, int64_t m, int dtype) {
    *job = (mx_job){.layer = layer, .x = in->x, .x_row = in->row, .x_block = in->block, .out = out, .m = m, .out_dtype = dtype};
    if (in->path >= MX_AVX512F && layer->bits < 16)
        for (int j = 0; j < 128; j++) job->table[j] = (uint16_t)(mx_bits(layer->values[j & ((1 << layer->bits) - 1)]) >> 16);
#ifdef MX_AMX_KNOWN
    if (in->path == MX_AMX && m > MX_AMX_MANY && !layer->integers) return mx_run_amx_many;
#endif
    return runner(in->path, layer->bits, layer->integers);
}

/* A few long pieces a thread, handed out as threads come free: a processor that is busy with something else delays
 * one piece, and each piece is read in one go. An even number of groups, which are multiplied two at a time. */
int64_t mx_piece_groups(int64_t groups, int64_t m, int path, int threads) {
    if (path == MX_AMX && m > MX_AMX_MANY && threads > 1) { /* these read x once a piece: few ones, and of the same size for all threads */
        const int64_t least = (groups + MX_AMX_GROUPS * threads - 1) / (MX_AMX_GROUPS * threads);
        int64_t best = 0, most = INT64_MAX;
        for (int64_t each = least; each <= 2 * least; each++) {
            const int64_t some = ((groups + each * threads - 1) / (each * threads) + 1) & ~1;
            if (some * each < most) best = some, most = some * each;
        }
        return best;
    }
    return threads < 2 ? groups : groups <= 2 * threads ? 1 : m > MANY_ROWS ? 2 : ((groups - 1) / (PIECES * threads) + 2) & ~1;
}

/* out[i] [m, n_i] = x [m, k] @ W_i^T + bias_i for at most MX_MANY layers. x and out have the dtype `dtype` and are contiguous. Returns 0, or
 * 1 for no memory. bfloat16 takes the dot-product path only if `path` is that one and the layer has no float32 weights; everything else is computed
 * in float32. */
int mx_linears(const mx_layer *const *layers, void *const *outs, int count, const void *x, int64_t m, int dtype, int path, int threads) {
    int alike = 1; /* all of them take the same x */
    for (int i = 0; i < count; i++)
        alike &= layers[i]->integers == layers[0]->integers && (layers[i]->bits == layers[0]->bits || (!layers[0]->integers && layers[i]->bits < 32 && layers[0]->bits < 32)) &&
                 (path != MX_AMX || (layers[i]->bits == 16) == (layers[0]->bits == 16));
    if (!alike) {
        int failed = 0;
        for (int i = 0; i < count; i++) failed |= mx_linears(layers + i, outs + i, 1, x, m, dtype, path, threads);
        return failed;
    }
    mx_input in;
    if (mx_make_input(&in, layers[0], x, m, dtype, path, threads)) return 1;
    jobs all;
    int64_t groups = 0;
    for (int i = 0; i < count; i++) {
        all.run[i] = mx_make_job(&all.job[i], layers[i], &in, outs[i], m, dtype);
        groups += (layers[i]->n + MX_ROWS - 1) / MX_ROWS;
    }
    all.first[0] = 0;
    all.groups = mx_piece_groups(groups, m, in.path, threads);
    for (int i = 0; i < count; i++)
        all.first[i + 1] = all.first[i] + ((layers[i]->n + MX_ROWS - 1) / MX_ROWS + all.groups - 1) / all.groups;
    mx_next(layers, count);
    mx_share(piece, &all, all.first[count], threads);
    free(in.own);
    return 0;
}

int mx_linear(const mx_layer *layer, const void *x, void *out, int64_t m, int dtype, int path, int threads) {
    return mx_linears(&layer, &out, 1, x, m, dtype, path, threads);
}

static double seconds(void) {
    struct timespec now;
    timespec_get(&now, TIME_UTC);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Bytes read per second is the caller's to divide: sums `count` 8-byte words, so that the compiler cannot skip the reads. */
uint64_t mx_read(const uint64_t *words, int64_t count, int threads) {
    uint64_t sum = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : sum) schedule(static)
    for (int64_t i = 0; i < count; i++) sum += words[i];
    return sum;
}

/* Multiply-adds per second on registers alone, on all threads: bfloat16 dot products, or float32 where there are none; 0 on other processors. */
double mx_dot_peak(int threads) {
    const int64_t rounds = 5000000;
    double start = seconds();
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int t = 0; t < threads; t++) mx_dot_loop(rounds);
    return (double)threads * rounds * mx_dot_loop(0) / (seconds() - start);
}
