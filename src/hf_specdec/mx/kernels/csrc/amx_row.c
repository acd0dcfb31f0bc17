/* One row of x, of which tiles would be nearly empty, by fused multiply-adds, as float32: the same bits as amx.c's, whose order of the sums this is, unless a number of x is
 * so small (mx_is_tiny) that a product may be below what tiles can hold. */
#include "mx.h"

#ifdef MX_AMX_KNOWN
#include "avx512.h"

#define TARGET512 "avx512f,avx512bw,avx512vl,avx512bf16,avx512vbmi,avx512vbmi2"
#define TABLE(job, bits) ((bits) == 8 ? mx_load_byte_table(job) : mx_load_table(job))
#define SPLIT2 SPLIT2_VBMI2
#define SPLIT7 SPLIT7_VBMI2
#define BYTES BYTES_VBMI
#define TO_BF16 BF16_WORDS
#define HALVES _Pragma("GCC unroll 2")

typedef struct {
    float first, second;
} pair;
typedef mx_pairs weights, partial;
#define PREPARE MX_PAIRS
#define WHOLE(sum) _mm512_add_ps((sum).first, (sum).second)

MX_INLINE __attribute__((target(TARGET512))) void add_products(partial *sum, const weights *w, const pair *x, const int groups) {
    const __m512 first = _mm512_set1_ps(x->first), second = _mm512_set1_ps(x->second);
#pragma GCC unroll 4
    for (int g = 0; g < groups; g++) {
        sum[g].first = _mm512_fmadd_ps(w[g].first, first, sum[g].first);
        sum[g].second = _mm512_fmadd_ps(w[g].second, second, sum[g].second);
    }
}

#include "few512.h"

/* Codes are worth 2^-18 or a multiple of it: from numbers of at least 2^-100, which are multiples of 2^-107, come no sums below 2^-126 but zero. */
__attribute__((target("avx2"))) int mx_is_tiny(const uint16_t *x, int64_t k) {
    int tiny = 0;
    for (int64_t i = 0; i < k; i++) tiny |= (uint16_t)((x[i] & 0x7fff) - 1) < (27 << 7) - 1;
    return tiny;
}

MX_INLINE ROWS512 void run(const mx_job *job, int64_t group, int64_t last, const int bits, const int integer) {
    for (int groups; group < last; group += groups) {
        groups = last - group >= 4 ? 4 : last - group >= 2 ? 2 : 1;
        if (groups == 4) multiply(job, group, 0, 4, 1, bits, integer, 0);
        else if (groups == 2) multiply(job, group, 0, 2, 1, bits, integer, 0);
        else multiply(job, group, 0, 1, 1, bits, integer, 0);
    }
}

BY_WIDTH(mx_run_amx_row, TARGET512)
#endif
