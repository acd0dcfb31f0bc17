/* Tiles times at most eight rows of x on AVX-512. One row's result is made by the same operations in the same order whatever the number of rows: per block of 32,
 * the products with sixteen pairs of inputs into a fresh sum, then sum * scale into the total. Included once per set of instructions, behind avx512.h, with
 *   TARGET512            the target of every function
 *   TABLE(job), SPLIT2, SPLIT7, BYTES, TO_BF16   how codes are looked up and results rounded (avx512.h)
 *   pair, weights        two inputs of a row of x; a vector of pairs of weights of 16 rows
 *   PREPARE(w)           `weights` of such a vector in bfloat16
 *   partial, WHOLE(sum)  the sum of a block as it is made, and as the total takes it
 *   add_products(sum, w, x, groups)   sum[g] += w[g] times the pair x, for every group
 *   HALVES               how the loop over the halves of a block is unrolled
 */
#define ROWS512 __attribute__((target(TARGET512)))

STORE_ROW(TARGET512, TO_BF16)
DECODE_TWO(decode_two, TARGET512, SPLIT2, SPLIT7, BYTES)

/* A block's sum, into the total: dense weights have no scale. */
#define ADD_BLOCK(total, sum, scale, scaled) ((scaled) ? _mm512_fmadd_ps(WHOLE(sum), scale, total) : _mm512_add_ps(total, WHOLE(sum)))

/* Row groups group .. group + groups - 1 times rows m0 .. m0 + rows - 1 of x. Every group and row is a chain of dependent sums: with too
 * few of them at once the multipliers wait, so that up to eight rows take two groups or more. */
MX_INLINE ROWS512 void multiply(const mx_job *job, int64_t group, int64_t m0, const int groups, const int rows, const int bits,
                                const int integer, const int several) {
    const mx_layer *l = job->layer;
    const int64_t k = l->k, blocks = k / MX_BLOCK;
    const int half_bytes = 32 * bits;
    const mx_table table = TABLE(job, bits);
    const pair *x = (const pair *)job->x + m0 * k / 2; /* as mx_pack_pairs and mx_pack_floats have them */
    const int64_t share = several ? blocks * 2 * half_bytes / ((job->m + 7) / 8) : 0; /* of the next group: what these rows' turn asks for */
    const uint8_t *codes[4], *scales[4];
    for (int g = 0; g < groups; g++) codes[g] = mx_group_codes(l, group + g), scales[g] = mx_group_scales(l, group + g);
    __m512 total[8][4];
    for (int m = 0; m < rows; m++)
        for (int g = 0; g < groups; g++) total[m][g] = _mm512_setzero_ps();
    for (int64_t b = 0; b < blocks; b++, x += rows * MX_BLOCK / 2) {
        partial sum[8][4];
        for (int m = 0; m < rows; m++)
            for (int g = 0; g < groups; g++) sum[m][g] = (partial){0};
        if (bits < 16) ask_ahead(codes, groups, b, blocks, 2 * half_bytes);
        HALVES
        for (int half = 0; half < 2; half++)
#pragma GCC unroll 4
        for (int two = 0; two < 4; two++) {
            __m512i w[4][2];
#pragma GCC unroll 4
            for (int g = 0; g < groups; g++) {
                const uint8_t *at = codes[g] + (2 * b + half) * half_bytes;
                decode_two(at, &table, w[g], two, bits, integer);
                if (bits == 16 && !several)
                    for (int line = 0; line < 128; line += 64) _mm_prefetch((const char *)at + two * 128 + line + AHEAD, _MM_HINT_T0);
            }
#pragma GCC unroll 2
            for (int i = 0; i < 2; i++) {
                weights ready[4];
#pragma GCC unroll 4
                for (int g = 0; g < groups; g++) ready[g] = PREPARE(w[g][i]);
#pragma GCC unroll 8
                for (int m = 0; m < rows; m++) add_products(sum[m], ready, x + (8 * half + 2 * two + i) * rows + m, groups);
            }
        }
        if (several) {
            const uint8_t *next = codes[0] + blocks * 2 * half_bytes + m0 / 8 * share;
            ask(next + b * share / blocks, next + (b + 1) * share / blocks);
        }
        for (int g = 0; g < groups; g++) {
            const __m512 scale = bits == 16 ? _mm512_setzero_ps() : mx_load_scales(scales[g] + b * MX_ROWS);
            for (int m = 0; m < rows; m++) total[m][g] = ADD_BLOCK(total[m][g], sum[m][g], scale, bits < 16);
        }
    }
    for (int g = 0; g < groups; g++)
        for (int m = 0; m < rows; m++) store_row(job, m0 + m, group + g, total[m][g]);
}
