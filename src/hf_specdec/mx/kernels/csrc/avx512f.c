/* Products by fused multiply-adds, on AVX-512 F, BW and VL; codes as on its first processors. */
#if defined(__x86_64__)
#include "avx512.h"

#define TARGET512 "avx512f,avx512bw,avx512vl"
#define RUN mx_run_avx512f
#define TABLE(job, bits) mx_load_table(job)
#define SPLIT2 SPLIT2_BW
#define SPLIT7 SPLIT7_BW
#define BYTES BYTES_BW
#define TO_BF16 bf16_words
#include "fused512.h"

/* Rows of x, [m, k] of this dtype, in float32, as mx_pack_pairs has them in bfloat16. */
__attribute__((target(TARGET512))) void mx_pack_floats(const void *x, int dtype, float *packed, int64_t chunk, int64_t m, int64_t k) {
    const int64_t m0 = 8 * chunk, rows = m - m0 < 8 ? m - m0 : 8;
    pair *to = (pair *)(packed + m0 * k), eight[8];
    for (int64_t j = 0; j < k / 2; j += 8) /* k is a multiple of 32 */
        for (int64_t r = 0; r < rows; r++) {
            _mm512_storeu_ps((float *)eight, mx_load_numbers(x, dtype, (m0 + r) * k + 2 * j));
            for (int i = 0; i < 8; i++) to[(j + i) * rows + r] = eight[i];
        }
}
#endif
