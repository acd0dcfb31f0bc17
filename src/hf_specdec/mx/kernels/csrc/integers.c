/* Layers whose activations are rounded: which instructions multiply them on a path. */
#include "mx.h"

#if defined(__x86_64__)
#include <cpuid.h>

#ifdef MX_AVX_VNNI
static int has_avx_vnni(void) {
    static int known = -1; /* asking takes long on a virtual machine */
    unsigned a = 0, b, c, d;
    if (known < 0) known = mx_has_path(MX_AVX2) && __get_cpuid_count(7, 1, &a, &b, &c, &d) && a >> 4 & 1;
    return known;
}
#endif

static int has_avx512_vnni(int wide) { /* wide: what avx512_vnni.c needs, of which Cascade Lake lacks VBMI */
    return mx_has_path(MX_AVX512F) && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni") &&
           (!wide || (__builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512dq")));
}
#endif

enum { NARROW, AVX_VNNI, AVX512VL_VNNI, WIDE_VNNI, AMX, KINDS };
static int forced = -1; /* by mx_force_integers */
void mx_force_integers(int kind) { forced = kind; }

/* Whether layers on this path may have their products from these instructions: NEON's are its narrow ones, as AVX2's are. */
int mx_has_integers(int path, int kind) {
    if (path == MX_PORTABLE) return 0;
    if (kind == NARROW) return 1;
#if defined(__x86_64__)
#ifdef MX_AVX_VNNI
    if (kind == AVX_VNNI) return has_avx_vnni();
#endif
    if (kind == AVX512VL_VNNI) return path >= MX_AVX512F && has_avx512_vnni(0);
    if (kind == WIDE_VNNI) return path >= MX_AVX512F && has_avx512_vnni(1);
#ifdef MX_AMX_KNOWN
    if (kind == AMX) return path == MX_AMX && mx_has_path(MX_AMX) && mx_has_amx(1);
#endif
#endif
    return 0;
}

/* The widest of them, or the one that is forced. */
int mx_integer_kind(int path) {
    if (forced >= 0 && mx_has_integers(path, forced)) return forced;
    int kind = KINDS - 1;
    while (kind >= 0 && !mx_has_integers(path, kind)) kind--;
    return kind;
}

const mx_integers *mx_integers_of(int path) {
    switch (mx_integer_kind(path)) {
#if defined(__x86_64__)
    case NARROW: return &mx_integers_avx2;
#ifdef MX_AVX_VNNI
    case AVX_VNNI: return &mx_integers_avx2_vnni;
#endif
    case AVX512VL_VNNI: return &mx_integers_avx512vl_vnni;
    case WIDE_VNNI: return &mx_integers_avx512_vnni;
#ifdef MX_AMX_KNOWN
    case AMX: return &mx_integers_amx;
#endif
#elif defined(__aarch64__)
    case NARROW: return &mx_integers_neon;
#endif
    }
    return NULL;
}
