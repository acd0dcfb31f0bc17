/* What layers that carry a state do to it, token by token: gated delta rules (Yang, Kautz, Hatamizadeh 2024, equation 10), with a gate a head or a channel,
 * state spaces with one decay a head (Mamba 2: Dao and Gu 2024, section 6), and the short convolutions before both. A token's bits depend on the state before
 * it alone, not on how many tokens come at once: the loops are the compiler's to vectorise, and sums are added up in one order.
 * Numbers are float32 or, where `half`, bfloat16; strides are in elements; states are float32. */
#include <math.h>

#include "recurrence_jobs.h"
#include "team.h"

#define PIECE 32    /* tokens whose numbers are made float32 at a time */
#define COLUMNS 32  /* of a state that are kept near: two vectors */
#define MOST 256    /* numbers of a head's key, or of a row of a state space */
#define CHANNELS 64 /* of a convolution that one thread takes at a time */
#define TAPS 16     /* of a convolution, at most */

typedef float v16 __attribute__((vector_size(64), aligned(4)));
typedef int32_t v16i __attribute__((vector_size(64), aligned(4)));
typedef uint32_t v16u __attribute__((vector_size(64), aligned(4)));
typedef uint16_t v16h __attribute__((vector_size(32), aligned(2)));
typedef float v8 __attribute__((vector_size(32), aligned(4)));
typedef float v4 __attribute__((vector_size(16), aligned(4)));

MX_INLINE float get(const void *numbers, int64_t i, const int half) {
    return half ? mx_from_bits((uint32_t)((const uint16_t *)numbers)[i] << 16) : ((const float *)numbers)[i];
}

MX_INLINE void put(void *numbers, int64_t i, float value, const int half) {
    if (half) ((uint16_t *)numbers)[i] = mx_to_bf16(value);
    else ((float *)numbers)[i] = value;
}

typedef struct {
    float q[PIECE][MOST], k[PIECE][MOST], decay[PIECE][MOST], beta[PIECE]; /* decay: of a gate a head the first one alone */
    v16 s[MOST][2];
} delta_work;

typedef struct {
    float b[PIECE][MOST], c[PIECE][MOST], decay[PIECE], step[PIECE]; /* zeros behind the last number of a row */
    v16 s[MOST / 16 + 1];
} space_work;

/* --- one of each for every set of instructions -------------------------------------------------------------------- */

#define TARGET
#define NAME(what) what##_anything
#include "recurrence.h"
#undef TARGET
#undef NAME
#if defined(__x86_64__)
#define TARGET __attribute__((target("avx2")))
#define NAME(what) what##_avx2
#include "recurrence.h"
#undef TARGET
#undef NAME
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq")))
#define NAME(what) what##_avx512
#include "recurrence.h"
#define RUN(WHAT, JOB, B, H)                                 \
    if ((JOB)->path >= MX_AVX512F) WHAT##_avx512(JOB, B, H); \
    else if ((JOB)->path == MX_AVX2) WHAT##_avx2(JOB, B, H); \
    else WHAT##_anything(JOB, B, H);
#else
#define RUN(WHAT, JOB, B, H) WHAT##_anything(JOB, B, H);
#endif

static void delta_piece(const void *context, int64_t item, int thread) {
    (void)thread;
    const mx_delta_job *job = context;
    RUN(delta, job, item / job->h, item % job->h)
}

static void space_piece(const void *context, int64_t item, int thread) {
    (void)thread;
    const mx_space_job *job = context;
    RUN(space, job, item / job->h, item % job->h)
}

static void conv_piece(const void *context, int64_t item, int thread) {
    (void)thread;
    const mx_conv_job *job = context;
    const int64_t pieces = (job->c + CHANNELS - 1) / CHANNELS, first = item % pieces * CHANNELS;
    for (int64_t c = first; c < first + CHANNELS && c < job->c; c += 16) { RUN(conv, job, item / pieces, c) }
}

void mx_delta(const mx_delta_job *job, int threads) { mx_share(delta_piece, job, job->b * job->h, threads); }
void mx_space(const mx_space_job *job, int threads) { mx_share(space_piece, job, job->b * job->h, threads); }
void mx_conv(const mx_conv_job *job, int threads) { mx_share(conv_piece, job, job->b * ((job->c + CHANNELS - 1) / CHANNELS), threads); }
