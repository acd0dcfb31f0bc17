/* RMS norms (Zhang and Sennrich 2019, section 4) as transformers' models have them. A row's result depends on that row alone:
 * the loops are the compiler's to vectorise, and 16 sums are added up in one order. */
#include <math.h>

#include "team.h"

enum { MX_NORM_ROUNDED, MX_NORM_ONE_MORE, MX_NORM_WIDE }; /* weight * round(y); round((1 + weight) * y); round(weight * y) */
#define SUMS 16
#define PIECE 32 /* rows that one thread takes at a time */

typedef struct {
    const void *x, *weight;
    void *out;
    int64_t rows, n;
    float eps;
    int32_t half, kind, path;
} mx_norm_job;

/* As mx_to_bf16, without a branch. */
MX_INLINE uint32_t to_bf16(float value) {
    const uint32_t bits = mx_bits(value), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return value == value ? rounded : 0x7fc0;
}

MX_INLINE float at(const void *numbers, int64_t i, const int half) {
    return half ? mx_from_bits((uint32_t)((const uint16_t *)numbers)[i] << 16) : ((const float *)numbers)[i];
}

MX_INLINE void norm(const mx_norm_job *job, const int half, const int kind, int64_t first, int64_t last) {
    const int64_t n = job->n, whole = n / SUMS * SUMS;
    for (int64_t row = first; row < last; row++) {
        const int64_t from = row * n;
        float sums[SUMS] = {0}, sum = 0;
        for (int64_t i = 0; i < whole; i += SUMS)
            for (int j = 0; j < SUMS; j++) sums[j] += at(job->x, from + i + j, half) * at(job->x, from + i + j, half);
        for (int64_t i = whole; i < n; i++) sum += at(job->x, from + i, half) * at(job->x, from + i, half);
        for (int j = 0; j < SUMS; j++) sum += sums[j];
        const float factor = 1.0f / sqrtf(sum / (float)n + job->eps);
        uint16_t *restrict words = (uint16_t *)job->out + from;
        float *restrict wide = (float *)job->out + from;
        for (int64_t i = 0; i < n; i++) {
            const float w = at(job->weight, i, half), y = at(job->x, from + i, half) * factor;
            const float product = (kind == MX_NORM_ONE_MORE ? 1.0f + w : w) * (half && kind == MX_NORM_ROUNDED ? mx_from_bits(to_bf16(y) << 16) : y);
            if (half) words[i] = (uint16_t)to_bf16(product);
            else wide[i] = product;
        }
    }
}

#define KINDS(JOB, HALF, FIRST, LAST)                                                              \
    if ((JOB)->kind == MX_NORM_ROUNDED) norm(JOB, HALF, MX_NORM_ROUNDED, FIRST, LAST);             \
    else if ((JOB)->kind == MX_NORM_ONE_MORE) norm(JOB, HALF, MX_NORM_ONE_MORE, FIRST, LAST);      \
    else norm(JOB, HALF, MX_NORM_WIDE, FIRST, LAST);

#define BOTH(NAME, TARGET)                                                                         \
    TARGET static void NAME(const mx_norm_job *job, int64_t first, int64_t last) {                 \
        if (job->half) { KINDS(job, 1, first, last) } else { KINDS(job, 0, first, last) }          \
    }

BOTH(by_anything, )
#if defined(__x86_64__)
BOTH(by_avx2, __attribute__((target("avx2"))))
BOTH(by_avx512, __attribute__((target("avx512f,avx512bw,avx512vl,prefer-vector-width=512"))))
#endif

static void piece(const void *context, int64_t item, int thread) {
    (void)thread;
    const mx_norm_job *job = context;
    const int64_t first = item * PIECE, last = first + PIECE < job->rows ? first + PIECE : job->rows;
#if defined(__x86_64__)
    if (job->path >= MX_AVX512F) by_avx512(job, first, last);
    else if (job->path == MX_AVX2) by_avx2(job, first, last);
    else
#endif
        by_anything(job, first, last);
}

/* job->out [rows, n] = the norm of x [rows, n] with weight [n]; all of them float32, or, where `half`, bfloat16. */
void mx_norm(const mx_norm_job *job, int threads) { mx_share(piece, job, (job->rows + PIECE - 1) / PIECE, job->rows > PIECE ? threads : 1); }
