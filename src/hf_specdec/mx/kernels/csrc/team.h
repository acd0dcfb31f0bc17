/* Work shared by threads. Outside `mx_together` a product is an OpenMP region of its own. Inside, the threads stay for a whole pass
 * of a model and wait for products by looking: while the first one runs what lies between two products, the others ask for the
 * weights, keys and values that are read next, so that memory is never idle. */
#ifndef HF_SPECDEC_TEAM_H
#define HF_SPECDEC_TEAM_H

#include "mx.h"

#define MX_MANY 4 /* products of one x that are made at once */

typedef void (*mx_piece)(const void *context, int64_t item, int thread);

/* piece(context, i, thread) for i in 0 .. items - 1, on up to `threads` threads; returns when all are done. */
void mx_share(mx_piece piece, const void *context, int64_t items, int threads);

/* The layers of the product that is about to be made: how a pass is learnt, whose next products are then read ahead. */
void mx_next(const mx_layer *const *layers, int count);

/* The same of attention, which is about to read slots low .. high - 1. */
void mx_next_slots(const mx_attention *a, int64_t low, int64_t high);
int mx_leads(void); /* whether the thread's work is a team's */
#endif
