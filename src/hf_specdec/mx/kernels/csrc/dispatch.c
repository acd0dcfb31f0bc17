/* Which instructions this processor has, and one product over all row groups on the threads of the caller's OpenMP. */
#include "mx.h"

#include <stdlib.h>
#include <time.h>

#define ABI 2
#define PIECES 4
int mx_abi(void) { return ABI; }

int mx_has_path(int path) {
    if (path == MX_PORTABLE) return 1;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (path == MX_AVX2)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    int f = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw");
    if (path == MX_AVX512F) return f;
    if (path == MX_AVX512_BF16)
        return f && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vbmi") &&
               __builtin_cpu_supports("avx512vbmi2") &&
               __builtin_cpu_supports("avx512bf16");
#endif
    return 0;
}

static mx_run runner(int path) {
#if defined(__x86_64__)
    if (path == MX_AVX512_BF16) return mx_run_avx512_bf16;
    if (path == MX_AVX512F) return mx_run_avx512f;
    if (path == MX_AVX2) return mx_run_avx2;
#endif
    return mx_run_portable;
}

#if defined(__x86_64__)
#include <immintrin.h>
/* Twelve independent chains, so that neither latency nor memory counts; returns the multiply-adds of one round. */
__attribute__((target("avx512f,avx512bf16"), noinline)) static int64_t bf16_loop(int64_t rounds) {
    __m512i bits = _mm512_set1_epi16(0x3f80);
    __m512 a[12];
    for (int i = 0; i < 12; i++) a[i] = _mm512_setzero_ps();
#define DOT(i) a[i] = _mm512_dpbf16_ps(a[i], (__m512bh)bits, (__m512bh)bits);
    for (int64_t r = 0; r < rounds; r++) {
        DOT(0) DOT(1) DOT(2) DOT(3) DOT(4) DOT(5) DOT(6) DOT(7) DOT(8) DOT(9) DOT(10) DOT(11)
        __asm__ volatile("" : "+v"(bits));
    }
    for (int i = 0; i < 12; i++) __asm__ volatile("" : : "v"(a[i]));
    return 12 * 32;
}
#endif

static int64_t mx_dot_loop(int64_t rounds) {
#if defined(__x86_64__)
    if (mx_has_path(MX_AVX512_BF16)) return bf16_loop(rounds);
#endif
    return 0;
}

static float *widened(const void *x, int dtype, int64_t count) {
    float *wide = malloc((size_t)(count + 1) * sizeof(float));
    if (wide)
        for (int64_t i = 0; i < count; i++) {
            uint16_t bits = ((const uint16_t *)x)[i];
            wide[i] = dtype == MX_DT_BF16 ? mx_from_bits((uint32_t)bits << 16) : mx_from_f16(bits);
        }
    return wide;
}

/* out [m, n] = x [m, k] @ W^T + bias. x and out have the dtype `dtype` and are contiguous. Returns 0, or 1 for no memory.
 * bfloat16 takes the dot-product path only if `path` is that one; everything else is computed in float32. */
int mx_linear(const mx_layer *layer, const void *x, void *out, int64_t m, int dtype, int path, int threads) {
    mx_job job = {.layer = layer, .x = x, .out = out, .m = m, .out_dtype = dtype};
    if (path >= MX_AVX512F && layer->bits < 16)
        for (int i = 0; i < 128; i++) job.table[i] = (uint16_t)(mx_bits(layer->values[i & ((1 << layer->bits) - 1)]) >> 16);
    void *own = NULL; /* x as the path wants it */
    if (path == MX_AVX512_BF16 && dtype != MX_DT_BF16) path = MX_AVX512F;
    if (path != MX_AVX512_BF16 && dtype != MX_DT_F32) {
        job.x = own = widened(x, dtype, m * layer->k);
        if (!own) return 1;
    } else if (path == MX_AVX512_BF16 && m > 1) {
        job.x = own = malloc((size_t)(m * layer->k * 2));
        if (!own) return 1;
        mx_pack_pairs(x, own, m, layer->k);
    }
    const mx_run run = runner(path);
    const int64_t groups = (layer->n + MX_ROWS - 1) / MX_ROWS;
    if (threads > groups) threads = (int)groups;
    if (threads <= 1) {
        run(&job, 0, groups);
    } else {
        /* A few long pieces a thread, handed out as threads come free: a processor that is busy with something else delays
         * one piece, and each piece is read in one go. An even number of groups, which are multiplied two at a time. */
        int64_t piece = (groups / (PIECES * threads) + 1) & ~1;
        if (piece < 1) piece = groups > 2 * threads ? 2 : 1;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
        for (int64_t at = 0; at < groups; at += piece) run(&job, at, at + piece < groups ? at + piece : groups);
    }
    free(own);
    return 0;
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

/* bfloat16 (or, on other paths, float32) multiply-adds per second: dot products on registers alone, on all threads. */
double mx_dot_peak(int threads) {
    const int64_t rounds = 5000000;
    double start = seconds();
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int t = 0; t < threads; t++) mx_dot_loop(rounds);
    return (double)threads * rounds * mx_dot_loop(0) / (seconds() - start);
}
