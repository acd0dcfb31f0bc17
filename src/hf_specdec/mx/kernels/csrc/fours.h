/* Layers whose activations are rounded to MXINT8: what avx512_vnni.c computes, bit for bit, by products of bytes. A few rows take the weights from
 * registers, more from the first-level cache, where a block is decoded once for all of them. Included once per set of instructions, behind integers.h, with
 *   TARGET, LANES          the target attribute of every function, rows of a vector
 *   AT_ONCE(bits)          rows of x that share a load of weights, at most MOST_AT_ONCE: as many as registers hold the sums of
 *   tables, load_tables(l), VALUES(code, t, bits)  what a vector of bytes with codes is worth, as bytes
 *   held, FOUR(sum, held, w, x, v, bits)  sum += products with four inputs of x, summed row by row; v counts the vectors of a block, and what is
 *                          not summed yet stays in held until v % 4 == 3
 *   MULADD(a, b, c)        a * b + c, fused
 *   LOAD_SCALES(scales)    LANES scales; byte 0 is 2^-127
 */
#define SIDES (MX_ROWS / LANES) /* vectors of a tile's rows */
#define VECTORS 8  /* of a tile and side: four inputs each */
#define FEW 3      /* rows of x for which a block is not written down */
#define MOST 64    /* rows of x that share a decoded block: whole chunks */
#define AHEAD 2048 /* bytes of codes that are asked for in advance */

typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef int32_t whole __attribute__((vector_size(4 * LANES)));
typedef uint16_t words __attribute__((vector_size(4 * LANES)));
typedef words words_anywhere __attribute__((aligned(2), may_alias));

/* Vector v of the four of half a tile, LANES rows of it, as bytes with a code each. */
MX_INLINE TARGET words code_bytes(const uint8_t *half, const int v, const int bits) {
#define LOAD(i) (*(const words_anywhere *)(const void *)(half + 64 * (i)))
    if (bits == 8) return LOAD(v);
    if (bits == 4) return (v % 2 ? LOAD(v / 2) >> 4 : LOAD(v / 2)) & 0x0f0f;
    if (v < 3) return (LOAD(v) & 0x003f) | (LOAD(v) << 2 & 0x3f00);
    return (LOAD(0) >> 12 | (LOAD(1) >> 4 & 0x0f00)) | ((LOAD(2) >> 8 & 0x0030) | (LOAD(2) >> 2 & 0x3000));
}

MX_INLINE TARGET whole decode(const uint8_t *half, const tables *t, const int v, const int bits) { return (whole)VALUES(code_bytes(half, v, bits), t, bits); }

/* total[row] += a block times its 32 inputs of `rows` rows of a chunk of `chunk` rows. The weights come from `tile`, or, without one, from the codes. One
 * row's result is made by the same operations in the same order whatever the number of rows. */
MX_INLINE TARGET void multiply(const whole (*tile)[SIDES], const uint8_t *codes, const uint8_t *scales, const tables *t, const int32_t *x, int64_t chunk,
                               lanes (*total)[SIDES], const int rows, const int bits) {
    whole sum[MOST_AT_ONCE][SIDES];
    held rest[MOST_AT_ONCE][SIDES];
#pragma GCC unroll 4
    for (int m = 0; m < rows; m++)
        for (int s = 0; s < SIDES; s++) sum[m][s] = (whole){0} + x[8 * chunk + m];
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) {
        whole w[SIDES];
        for (int s = 0; s < SIDES; s++) w[s] = tile ? tile[v][s] : decode(codes + v / 4 * 32 * bits + 4 * LANES * s, t, v % 4, bits);
#pragma GCC unroll 4
        for (int m = 0; m < rows; m++) {
            const whole inputs = (whole){0} + x[v * chunk + m];
            for (int s = 0; s < SIDES; s++) { FOUR(sum[m][s], rest[m][s], w[s], inputs, v, bits) }
        }
    }
#pragma GCC unroll 4
    for (int m = 0; m < rows; m++)
        for (int s = 0; s < SIDES; s++) {
            const lanes scale = (lanes)LOAD_SCALES(scales + LANES * s), own = (lanes){0} + mx_from_bits((uint32_t)x[9 * chunk + m]);
            total[m][s] = MULADD(__builtin_convertvector(sum[m][s], lanes) * scale, own, total[m][s]);
        }
}

MX_INLINE TARGET void run(const mx_job *job, int64_t first, int64_t last, const int bits) {
    const mx_layer *l = job->layer;
    const int64_t blocks = l->k / MX_BLOCK, at_once = AT_ONCE(bits);
    const tables t = load_tables(l);
    lanes total[MOST][SIDES];
    whole tile[VECTORS][SIDES];
    for (int64_t group = first; group < last; group++)
        for (int64_t m0 = 0; m0 < job->m; m0 += MOST) {
            const uint8_t *codes = mx_group_codes(l, group), *scales = mx_group_scales(l, group);
            const int64_t rows = job->m - m0 < MOST ? job->m - m0 : MOST;
            __builtin_memset(total, 0, (size_t)rows * sizeof total[0]);
            for (int64_t b = 0; b < blocks; b++, codes += 64 * bits, scales += MX_ROWS) {
                for (int line = 0; line < 64 * bits; line += 64) __builtin_prefetch(codes + line + AHEAD);
                const int32_t *x = (const int32_t *)job->x + m0 * blocks * WORDS;
#define DIRECT(R) case R: multiply(NULL, codes, scales, &t, x + b * R * WORDS, R, total, R, bits); continue;
                switch (rows) { DIRECT(1) DIRECT(2) DIRECT(FEW) }
#pragma GCC unroll 8
                for (int v = 0; v < VECTORS; v++)
                    for (int s = 0; s < SIDES; s++) tile[v][s] = decode(codes + v / 4 * 32 * bits + 4 * LANES * s, &t, v % 4, bits);
                for (int64_t m = 0; m < rows; m += 8) {
                    const int64_t chunk = rows - m < 8 ? rows - m : 8;
                    const int32_t *own = x + (m * blocks + b * chunk) * WORDS;
                    for (int64_t i = 0; i < chunk; i += at_once)
#define CASE(R) case R: multiply(tile, NULL, scales, &t, own + i, chunk, total + m + i, R, bits); break;
                        switch (chunk - i < at_once ? chunk - i : at_once) { CASE(1) CASE(2) CASE(3) CASE(4) }
                }
            }
            for (int64_t m = 0; m < rows; m++) {
                const int64_t left = l->n - group * MX_ROWS;
                mx_store(job, m0 + m, group * MX_ROWS, (const float *)total[m], left < MX_ROWS ? left : MX_ROWS);
            }
        }
}

#define FOR_BITS(BITS) \
    static TARGET __attribute__((noinline)) void run##BITS(const mx_job *job, int64_t first, int64_t last) { run(job, first, last, BITS); }
FOR_BITS(4) FOR_BITS(6) FOR_BITS(8)

static void product(const mx_job *job, int64_t first, int64_t last) {
    (job->layer->bits == 4 ? run4 : job->layer->bits == 6 ? run6 : run8)(job, first, last);
}
