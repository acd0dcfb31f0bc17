/* Attention in which every query of every head is computed alone: the same bits at every number of queries, rows and threads,
 * at every capacity of the cache and under every mask that shows it the same slots. Portable code, and the threads. */
#define TARGET
#define RUN mx_attend_portable
#define F16(words) ((v8){H(0), H(1), H(2), H(3), H(4), H(5), H(6), H(7)})
#define H(i) mx_from_f16(words[i])
#include "attention.h"

#include <stdlib.h>
#ifdef _OPENMP
#include <omp.h>
#define THREAD omp_get_thread_num()
#else
#define THREAD 0
#endif

#if defined(__x86_64__)
void mx_attend_avx2(const mx_attention *, int64_t, int64_t, int64_t, int32_t *, float *, float *);
#endif
typedef void (*mx_attend)(const mx_attention *, int64_t, int64_t, int64_t, int32_t *, float *, float *);

/* out [batch, queries, heads, dv]. Returns 0, or 1 for no memory. */
int mx_attention_rows(const mx_attention *a, int path, int threads) {
    mx_attend run = mx_attend_portable;
#if defined(__x86_64__)
    if (path >= MX_AVX2) run = mx_attend_avx2;
#endif
    const int64_t items = a->batch * a->kv_heads * a->queries, room = (a->slots + 15) & ~7, scratch = room + a->dk + 8;
    if (a->batch * a->heads * a->queries * a->slots < 1 << 12) threads = 1;
    if (threads > items) threads = (int)items;
    if (threads < 1) threads = 1;
    float *memory = malloc((size_t)threads * (size_t)(2 * room + scratch) * sizeof(float));
    if (!memory) return 1;
    const int64_t piece = items / (16 * threads) + 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(dynamic, 1)
        for (int64_t first = 0; first < items; first += piece) {
            float *own = memory + THREAD * (2 * room + scratch);
            for (int64_t i = first; i < items && i < first + piece; i++)
                run(a, i / a->queries / a->kv_heads, i / a->queries % a->kv_heads, i % a->queries, (int32_t *)own, own + room,
                    own + 2 * room);
        }
    }
    free(memory);
    return 0;
}
