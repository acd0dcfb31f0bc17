/* Which instructions multiply on the paths of AVX-512. */
#include "mx.h"

#if defined(__x86_64__)
#include <cpuid.h>

/* A dot product of bfloat16 takes Intel's processors four times as long as a fused multiply-add of float32, two of which do the same, bit for bit. */
static int slow_dots(void) {
    static int known = -1; /* asking takes long on a virtual machine */
    unsigned a, b, c, d;
    if (known < 0) known = __get_cpuid(0, &a, &b, &c, &d) && b == signature_INTEL_ebx && c == signature_INTEL_ecx && d == signature_INTEL_edx;
    return known;
}
#endif

static int forced = -1; /* by mx_force_products */
void mx_force_products(int kind) { forced = kind; }

/* Whether this processor has these; on the path of AVX-512 F all but dot products. (That of AMX takes the others where it has no tiles to fill.) */
int mx_has_products(int path, int kind) {
#if defined(__x86_64__)
    if (path < MX_AVX512F || path > MX_AVX512_BF16 || !mx_has_path(path)) return 0;
    if (kind == MX_DOTS) return path == MX_AVX512_BF16;
    return kind == MX_FUSED || (__builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2"));
#else
    (void)path, (void)kind;
    return 0;
#endif
}

/* -1: there is no choice. */
int mx_product_kind(int path) {
    if (forced >= 0 && mx_has_products(path, forced)) return forced;
    int kind = MX_DOTS;
#if defined(__x86_64__)
    kind -= slow_dots();
#endif
    while (kind >= 0 && !mx_has_products(path, kind)) kind--;
    return kind;
}
