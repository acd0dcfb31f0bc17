/* Inputs of a layer, rounded to MXINT8 (scale rule "even"), as the integer kernels read them: chunks of eight rows (the last one may be shorter); in a
 * chunk, block after block, WORDS words of every row: four inputs of the first row, of the second, and so on, the next four; then the rows' shares
 * of the offset, which makes the weights positive, then their scales. */
#ifndef HF_SPECDEC_MX_INTEGERS_H
#define HF_SPECDEC_MX_INTEGERS_H

#include "mx.h"

#define WORDS 10 /* of a row's block of x: eight times four inputs, the offset's share, the scale */

/* The inputs of a block in the order in which the codes of a tile become bytes: lane 4 * i of half h has the inputs of vectors PAIRS[i] of that half. */
MX_INLINE void order_of(int bits, uint8_t order[MX_BLOCK]) {
    static const uint8_t pairs[3][4][2] = {{{0, 2}, {1, 3}, {4, 6}, {5, 7}}, {{0, 1}, {3, 4}, {5, 6}, {2, 7}}, {{0, 1}, {2, 3}, {4, 5}, {6, 7}}};
    for (int half = 0; half < 2; half++)
        for (int i = 0; i < 4; i++)
            for (int byte = 0; byte < 4; byte++)
                order[16 * half + 4 * i + byte] = (uint8_t)(16 * half + 2 * pairs[bits / 2 - 2][i][byte % 2] + byte / 2);
}
#endif
