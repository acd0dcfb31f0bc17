/* float32 weights in plain C. */
#define TARGET
#define RUN mx_run32_portable
#define LANES 4
#define MOST 2
#define GROUPS 1
#define SPLAT(x) ((lanes){x, x, x, x})
#define MULADD(a, b, c) ((a) * (b) + (c))
#include "dense32.h"
