/* Eight rows of eight words become eight columns; with TARGET, the target attribute of the function, or nothing. */
#include "mx.h"

typedef int32_t mx_v8i __attribute__((vector_size(32), aligned(4)));
typedef uint32_t v8u __attribute__((vector_size(32), aligned(4)));

#define MIX2(x, y, ...) __builtin_shuffle(x, y, (mx_v8i){__VA_ARGS__})
#if defined(__clang__)
#undef MIX2
#define MIX2(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#endif

MX_INLINE TARGET void turn(v8u *row) {
    v8u pairs[8], fours[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        pairs[i] = MIX2(row[i], row[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        pairs[i + 1] = MIX2(row[i], row[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) { /* word i of four rows, and word 4 + i */
        const v8u x = pairs[i / 2], y = pairs[i / 2 + 2], z = pairs[4 + i / 2], w = pairs[6 + i / 2];
        fours[i] = i % 2 ? MIX2(x, y, 2, 3, 10, 11, 6, 7, 14, 15) : MIX2(x, y, 0, 1, 8, 9, 4, 5, 12, 13);
        fours[4 + i] = i % 2 ? MIX2(z, w, 2, 3, 10, 11, 6, 7, 14, 15) : MIX2(z, w, 0, 1, 8, 9, 4, 5, 12, 13);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        row[i] = MIX2(fours[i], fours[4 + i], 0, 1, 2, 3, 8, 9, 10, 11);
        row[4 + i] = MIX2(fours[i], fours[4 + i], 4, 5, 6, 7, 12, 13, 14, 15);
    }
}

