/* Attention in which every query of every head is computed alone: the same bits at every number of queries, rows and threads,
 * at every capacity of the cache and under every mask that shows it the same slots. Portable code, and the threads. */
#define TARGET
#define RUN mx_attend_portable
#define LANES 4
#define QUERIES 4
#define WEIGHTS 2
#define ANY(lanes) ((lanes)[0] | (lanes)[1] | (lanes)[2] | (lanes)[3])
#define FUSED(a, b, sum) rounded_once(a, (four){b, b, b, b}, sum)
#define DOUBLES(eight) __builtin_convertvector(eight, v8d)
#define F16(words) ((v8){H(0), H(1), H(2), H(3), H(4), H(5), H(6), H(7)})
#define H(i) mx_from_f16(words[i])

#include "mx.h"

/* sum + a * b, rounded once, of four numbers, where the processor may not have it: the product is exact in double precision, and of the sum there what was cut off is
 * put into its last bit ("round to odd": Boldo and Melquiond 2008, theorem 3), so that rounding it again does what rounding it once would. */
typedef float four __attribute__((vector_size(16), aligned(4)));
typedef double wide __attribute__((vector_size(32)));
typedef int64_t bits __attribute__((vector_size(32)));
MX_INLINE four rounded_once(four a, four b, four sum) {
    const wide product = __builtin_convertvector(a, wide) * __builtin_convertvector(b, wide), other = __builtin_convertvector(sum, wide);
    wide total = product + other;
    const wide part = total - product, cut = (product - (total - part)) + (other - part); /* Knuth's sum: exact */
    const bits even = ((bits)total & 1) - 1, outwards = (cut > 0.0) == (total > 0.0), some = (cut > 0.0) | (cut < 0.0);
    total = (wide)((bits)total + (some & even & ((outwards & 1) | ~outwards)));
    return __builtin_convertvector(total, four);
}
#include "attention.h"

#include <stdlib.h>

#include "team.h"

#if defined(__x86_64__)
void mx_attend_avx2(const mx_attention *, int64_t, int64_t, int64_t, int64_t, float *);
void mx_attend_avx512(const mx_attention *, int64_t, int64_t, int64_t, int64_t, float *);
void mx_attend_avx512_bf16(const mx_attention *, int64_t, int64_t, int64_t, int64_t, float *);
#elif defined(__aarch64__)
void mx_attend_neon(const mx_attention *, int64_t, int64_t, int64_t, int64_t, float *);
#endif
typedef void (*mx_attend)(const mx_attention *, int64_t, int64_t, int64_t, int64_t, float *);

#define MOST 64          /* queries of a tile, heads counted */
#define FEW 3            /* of these, for which reading half as much counts for more than slow dot products: the bits are the same */
#define SCORES (1 << 17) /* and at most so many scores, unless one query has more */
#define NEAR 16          /* slots between two looks at a mask */
#define READING 3        /* rows whose scores and sums take as long as reading the keys and values of a tile */

/* Queries of a tile: as many as share keys and values with profit, or as leave all threads as little to do as can be, where reading these costs what READING rows do. */
static int64_t tile_of(const mx_attention *a, int threads, int64_t room) {
    const int64_t heads = a->heads / a->kv_heads, pairs = a->batch * a->kv_heads;
    int64_t most = SCORES / room < MOST ? SCORES / room / heads : MOST / heads, best = 0, least = INT64_MAX;
    if (most < 1) most = 1;
    for (int64_t tiles = 1; tiles <= a->queries && (tiles - 1) * pairs < 4 * threads; tiles++) {
        const int64_t count = (a->queries + tiles - 1) / tiles, turns = (tiles * pairs + threads - 1) / threads, work = turns * (READING + heads * count);
        if (count <= most && work < least) best = count, least = work;
    }
    return best ? best : most;
}

typedef struct {
    const mx_attention *a;
    mx_attend run;
    int64_t count, tiles, scratch;
    float *memory;
} tiled;

static void one_tile(const void *context, int64_t i, int thread) {
    const tiled *t = context;
    const int64_t first = (t->tiles - 1 - i % t->tiles) * t->count, left = t->a->queries - first, pair = i / t->tiles;
    t->run(t->a, pair / t->a->kv_heads, pair % t->a->kv_heads, first, left < t->count ? left : t->count, t->memory + thread * t->scratch);
}

/* Tell the team which slots are read: those from the first to the last that the last query of the first row sees, some more or less. */
static void tell(const mx_attention *a) {
    int64_t low = 0, high = a->slots;
    const int64_t at = (a->queries - 1) * a->mask_stride[2], step = a->mask_stride[3];
    if (a->mask) {
        while (high > 0 && !(masked(a, at + (high - 1) * step) > a->nothing)) high -= high < NEAR ? high : NEAR;
        while (low < high && !(masked(a, at + low * step) > a->nothing)) low += NEAR;
        low = low > NEAR ? low - NEAR : 0, high = high + NEAR < a->slots ? high + NEAR : a->slots;
    }
    mx_next_slots(a, low, high);
}

/* out [batch, queries, heads, dv]. Returns 0, or 1 for no memory. */
int mx_attention_rows(const mx_attention *a, int path, int threads) {
    mx_attend run = mx_attend_portable;
#if defined(__x86_64__)
    if (path >= MX_AVX2) run = mx_attend_avx2;
    if (path >= MX_AVX512F && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        run = path >= MX_AVX512_BF16 && (mx_product_kind(MX_AVX512_BF16) == MX_DOTS || a->queries * a->heads < FEW * a->kv_heads) ? mx_attend_avx512_bf16 : mx_attend_avx512;
#elif defined(__aarch64__)
    if (path == MX_NEON) run = mx_attend_neon;
#else
    (void)path;
#endif
    if (a->batch * a->heads * a->queries * a->slots < 1 << 12) threads = 1;
    const int64_t room = (a->slots + 31) & ~31, dk = (a->dk + 15) & ~15, dv = (a->dv + 15) & ~15, count = tile_of(a, threads, room);
    const int64_t tiles = (a->queries + count - 1) / count, items = a->batch * a->kv_heads * tiles;
    const int64_t rows = a->heads / a->kv_heads * count, bias = a->mask ? (a->mask_stride[1] ? rows : count) * room : 0;
    const int64_t scratch = rows * (dk + dv + room + 16 + 16) + ((rows + 15) & ~15) + bias + 32 * (dk > dv ? dk : dv); /* whole lines of a cache */
    if (threads > items) threads = (int)items;
    if (threads < 1) threads = 1;
    float *memory = aligned_alloc(64, (size_t)threads * (size_t)scratch * sizeof(float));
    if (!memory) return 1;
    const tiled all = {a, run, count, tiles, scratch, memory};
    if (mx_leads()) tell(a);
    mx_share(one_tile, &all, items, threads);
    free(memory);
    return 0;
}
