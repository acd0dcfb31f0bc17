#include "team.h"

#include <sched.h>
#include <stdatomic.h>
#ifdef _OPENMP
int omp_get_thread_num(void), omp_get_num_threads(void), omp_in_parallel(void); /* Apple's compiler has no omp.h */
#define THREAD omp_get_thread_num()
#define THREADS omp_get_num_threads()
#define IN_PARALLEL omp_in_parallel()
#else
#define THREAD 0
#define THREADS 1
#define IN_PARALLEL 1
#endif

#define MOST 256                 /* threads of a team */
#define AHEAD (768 << 10)        /* bytes that a thread asks for in advance: they have to stay in its second-level cache */
#define DEEP 6                   /* products looked ahead */
#define STEP 8                   /* cache lines asked for between two looks at what there is to do */
#define KNOWN 4096               /* products remembered */
#define GROUP 16                 /* slots of keys and values */
#define PATIENCE 2000            /* looks before the processor is offered to others */

/* What a product, or attention, reads: addresses alone, which may be stale and are only asked for. */
typedef struct {
    const uint8_t *start[2];          /* scales and codes of full row groups; or keys and values */
    int64_t bytes[2];                 /* of a group, or of GROUP slots, in each */
    int64_t groups, row, row_step[2]; /* all of them, how many lie in a row, and from where one row begins to where the next one does */
} weights;

typedef struct {
    weights part[MX_MANY];
    int count;
    int64_t groups;     /* of all parts */
    const uint8_t *key; /* a product's weights; of attention, whose buffers change, and may be those of several layers, one byte behind that of the product before it */
} product;

static struct {
    int threads;
    atomic_int active; /* those that take part in the job */
    mx_piece piece;
    const void *context;
    struct {
        product next[DEEP];
        int deep;
        uint64_t number; /* of the product before */
    } ahead[2];          /* in turn, so that a thread that still reads one is not disturbed */
    atomic_uint list;    /* the one that counts */
    atomic_int busy, ended;
    _Alignas(64) atomic_uint posted;   /* the number of the job at hand */
    _Alignas(64) atomic_llong left;    /* its items that are not done */
    struct {
        _Alignas(64) atomic_ullong at; /* number of the job << 32 | next item */
        atomic_llong last;
    } range[MOST];                     /* every thread begins with the items of its own, and goes on with its neighbours' */
} team;
static _Thread_local int leading;

/* ---- what comes after what ---- */

static struct {
    const uint8_t *key;
    product next;
} known[KNOWN];
static const uint8_t *previous;

static int64_t place(const uint8_t *key) { return (int64_t)(((uint64_t)(uintptr_t)key * 0x9e3779b97f4a7c15u) >> 52); }

/* `now`, which is about to be made, comes after the one before. */
static void comes(const product *now) {
    const uint8_t *key = now->key;
    if (previous) known[place(previous)].key = previous, known[place(previous)].next = *now;
    previous = key;
    const unsigned list = atomic_load_explicit(&team.list, memory_order_relaxed), other = 1 - list;
    int deep = 0;
    for (; deep < DEEP && known[place(key)].key == key; deep++) {
        team.ahead[other].next[deep] = known[place(key)].next;
        key = known[place(key)].next.key;
    }
    team.ahead[other].deep = deep;
    team.ahead[other].number = team.ahead[list].number + 1;
    atomic_store_explicit(&team.list, other, memory_order_release);
}

void mx_next(const mx_layer *const *layers, int count) {
    if (!leading) return;
    product now = {.count = count < MX_MANY ? count : MX_MANY, .key = layers[0]->codes};
    for (int i = 0; i < now.count; i++) {
        const mx_layer *l = layers[i];
        const int64_t blocks = l->k / MX_BLOCK, groups = l->n / MX_ROWS;
        now.part[i] = (weights){{l->scales, l->codes}, {l->scales ? blocks * MX_ROWS : 0, blocks * mx_tile_bytes(l->bits)}, groups, groups + 1, {0}};
        now.groups += groups;
    }
    comes(&now);
}

void mx_next_slots(const mx_attention *a, int64_t low, int64_t high) {
    const int64_t bytes = a->dtype == MX_DT_F32 ? 4 : 2, groups = (high - low + GROUP - 1) / GROUP;
    if (!leading || !previous || groups < 1) return;
    const weights both = {{(const uint8_t *)a->k + low * a->k_stride[2] * bytes, (const uint8_t *)a->v + low * a->v_stride[2] * bytes},
                          {GROUP * a->k_stride[2] * bytes, GROUP * a->v_stride[2] * bytes},
                          groups * a->kv_heads, groups, {a->k_stride[1] * bytes, a->v_stride[1] * bytes}};
    comes(&(product){.part = {both}, .count = 1, .groups = both.groups, .key = previous + 1});
}

int mx_leads(void) { return leading; }

/* ---- the others ---- */

static int called(unsigned seen) {
    return atomic_load_explicit(&team.posted, memory_order_acquire) != seen || atomic_load_explicit(&team.ended, memory_order_acquire);
}

/* Ask for [at, at + bytes) until there is something to do; the bytes asked for. */
static int64_t ask(const uint8_t *at, int64_t bytes, unsigned seen) {
    for (int64_t line = 0; line < bytes; line += 64) {
        if (line % (64 * STEP) == 0 && called(seen)) return line;
        __builtin_prefetch(at + line, 0, 2);
    }
    return bytes;
}

/* How far a thread is: the bytes it has asked for of its share of a product. */
typedef struct {
    uint64_t number;
    int64_t bytes;
} cursor;

/* Ask for the thread's share of the next products' weights, the first product first. */
static void read_ahead(int thread, unsigned seen, cursor *at) {
    const unsigned list = atomic_load_explicit(&team.list, memory_order_acquire);
    const uint64_t number = team.ahead[list].number;
    int64_t budget = AHEAD;
    for (int deep = 0; deep < team.ahead[list].deep; deep++) {
        const product p = team.ahead[list].next[deep];
        const int64_t whole = p.groups * (thread + 1) / team.threads - p.groups * thread / team.threads;
        int64_t first = p.groups * thread / team.threads, left = whole, before = 0;
        if (number + 1 + deep > at->number) at->number = number + 1 + deep, at->bytes = 0;
        for (int i = 0; i < p.count && left > 0; i++) {
            const weights *w = &p.part[i];
            for (int64_t count; first < w->groups && left > 0; first += count, left -= count) { /* as many as lie in one row */
                const int64_t at_row = first % w->row, rest = w->groups - first < w->row - at_row ? w->groups - first : w->row - at_row;
                count = left < rest ? left : rest;
                for (int j = 0; j < 2; j++) {
                    const int64_t bytes = count * w->bytes[j];
                    if (number + 1 + deep == at->number && before + bytes > at->bytes) {
                        const int64_t done = at->bytes > before ? at->bytes - before : 0;
                        const int64_t wanted = bytes - done < budget ? bytes - done : budget;
                        const int64_t asked = ask(w->start[j] + first / w->row * w->row_step[j] + at_row * w->bytes[j] + done, wanted, seen);
                        at->bytes = before + done + asked;
                        if (asked < wanted) return;
                    }
                    before += bytes, budget -= bytes;
                    if (budget <= 0) return;
                }
            }
            first = first > w->groups ? first - w->groups : 0;
        }
    }
}

static void work(unsigned job, int thread) {
    const int active = atomic_load_explicit(&team.active, memory_order_relaxed);
    for (int i = 0; i < active && thread < active; i++) {
        const int owner = (thread + i) % active;
        for (;;) {
            unsigned long long at = atomic_load_explicit(&team.range[owner].at, memory_order_acquire);
            const long long last = atomic_load_explicit(&team.range[owner].last, memory_order_acquire);
            if (at >> 32 != job) return; /* late: the job is done */
            if ((long long)(at & 0xffffffff) >= last) break;
            if (!atomic_compare_exchange_weak_explicit(&team.range[owner].at, &at, at + 1, memory_order_acq_rel, memory_order_relaxed))
                continue;
            team.piece(team.context, (int64_t)(at & 0xffffffff), thread);
            atomic_fetch_sub_explicit(&team.left, 1, memory_order_release);
        }
    }
}

static void wait_and_work(int thread, unsigned seen) {
    cursor at = {0, 0};
    while (!atomic_load_explicit(&team.ended, memory_order_acquire)) {
        for (int looks = 0; !called(seen); looks++) {
            if (looks == PATIENCE) looks = 0, sched_yield();
#if defined(__x86_64__)
            __builtin_ia32_pause();
#elif defined(__aarch64__)
            __asm__ volatile("yield");
#endif
        }
        const unsigned job = atomic_load_explicit(&team.posted, memory_order_acquire);
        if (job == seen) continue;
        work(seen = job, thread);
        read_ahead(thread, seen, &at);
    }
}

/* ---- the first one ---- */

static void by_team(mx_piece piece, const void *context, int64_t items, int threads) {
    if (threads > team.threads) threads = team.threads;
    atomic_store_explicit(&team.active, threads, memory_order_relaxed);
    team.piece = piece, team.context = context;
    const unsigned job = atomic_load(&team.posted) + 1;
    atomic_store_explicit(&team.left, items, memory_order_relaxed);
    for (int t = 0; t < threads; t++) {
        /* closed: a thread that is late with the job before must not take an item of this one for its own */
        atomic_store_explicit(&team.range[t].at, (unsigned long long)job << 32 | 0xffffffff, memory_order_relaxed);
        atomic_store_explicit(&team.range[t].last, items * (t + 1) / threads, memory_order_release);
        atomic_store_explicit(&team.range[t].at, (unsigned long long)job << 32 | (unsigned long long)(items * t / threads), memory_order_release);
    }
    atomic_store_explicit(&team.posted, job, memory_order_release);
    work(job, 0);
    for (int looks = 0; atomic_load_explicit(&team.left, memory_order_acquire) > 0; looks++)
        if (looks == PATIENCE) looks = 0, sched_yield();
}

/* Every thread begins with the items of its own, one after another, and goes on with its neighbours'. */
static void by_region(mx_piece piece, const void *context, int64_t items, int threads) {
    struct {
        _Alignas(64) atomic_llong at;
    } range[MOST];
    for (int t = 0; t < threads; t++) atomic_init(&range[t].at, items * t / threads);
#pragma omp parallel num_threads(threads)
    for (int i = 0; i < threads; i++) {
        const int owner = (THREAD + i) % threads;
        for (long long at; (at = atomic_fetch_add_explicit(&range[owner].at, 1, memory_order_relaxed)) < items * (owner + 1) / threads;) piece(context, at, THREAD);
    }
}

void mx_share(mx_piece piece, const void *context, int64_t items, int threads) {
    if (threads > items) threads = (int)items;
    if (threads > MOST) threads = MOST;
    if (threads <= 1) {
        for (int64_t i = 0; i < items; i++) piece(context, i, 0);
    } else if (leading) {
        by_team(piece, context, items, threads);
    } else {
        by_region(piece, context, items, threads);
    }
}

/* Calls `body` once, on the calling thread, while threads - 1 others wait for its products. One team at a time: a second caller,
 * and one inside a parallel region, runs its body without. */
void mx_together(void (*body)(void), int threads) {
    int free_now = 0;
    if (threads < 2 || threads > MOST || IN_PARALLEL || !atomic_compare_exchange_strong(&team.busy, &free_now, 1)) {
        body();
        return;
    }
    atomic_store(&team.ended, 0);
    previous = NULL, team.ahead[team.list].deep = 0;
    const unsigned seen = atomic_load(&team.posted);
#pragma omp parallel num_threads(threads)
    {
        if (THREAD == 0) {
            team.threads = THREADS;
            leading = team.threads > 1;
            body();
            leading = 0;
            atomic_store_explicit(&team.ended, 1, memory_order_release);
        } else {
            wait_and_work(THREAD, seen);
        }
    }
    atomic_store(&team.busy, 0);
}
