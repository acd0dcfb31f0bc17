/* float32 activations in plain C: the path of every other processor, and the one the others are read against. */
#include "mx.h"

void mx_tile_values(const uint8_t *tile, const float *values, int bits, float w[MX_BLOCK][MX_ROWS]);

#define CHUNK 8

void mx_run_portable(const mx_job *job, int64_t first, int64_t last) {
    const mx_layer *l = job->layer;
    const int64_t blocks = l->k / MX_BLOCK, tile_bytes = mx_tile_bytes(l->bits);
    for (int64_t group = first; group < last; group++) {
        const int64_t left = l->n - group * MX_ROWS;
        for (int64_t m0 = 0; m0 < job->m; m0 += CHUNK) {
            const int64_t rows = job->m - m0 < CHUNK ? job->m - m0 : CHUNK;
            float total[CHUNK][MX_ROWS] = {{0}};
            for (int64_t b = 0; b < blocks; b++) {
                float w[MX_BLOCK][MX_ROWS], scale[MX_ROWS];
                mx_tile_values(mx_group_codes(l, group) + b * tile_bytes, l->values, l->bits, w);
                for (int r = 0; r < MX_ROWS; r++)
                    scale[r] = l->bits == 16 ? 1.0f : mx_scale(mx_group_scales(l, group)[b * MX_ROWS + r]);
                for (int64_t m = 0; m < rows; m++) {
                    const float *x = (const float *)job->x + (m0 + m) * l->k + b * MX_BLOCK;
                    float sum[MX_ROWS] = {0};
                    for (int i = 0; i < MX_BLOCK; i++)
                        for (int r = 0; r < MX_ROWS; r++) sum[r] += w[i][r] * x[i];
                    for (int r = 0; r < MX_ROWS; r++) total[m][r] += sum[r] * scale[r];
                }
            }
            for (int64_t m = 0; m < rows; m++)
                mx_store(job, m0 + m, group * MX_ROWS, total[m], left < MX_ROWS ? left : MX_ROWS);
        }
    }
}
