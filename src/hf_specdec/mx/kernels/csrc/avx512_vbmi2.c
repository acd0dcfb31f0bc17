/* Products by fused multiply-adds, where codes are looked up by VBMI and VBMI2: the same bits as avx512f.c's. */
#if defined(__x86_64__)
#include "avx512.h"

#define TARGET512 "avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2"
#define RUN mx_run_avx512_vbmi2
#define TABLE(job, bits) ((bits) == 8 ? mx_load_byte_table(job) : mx_load_table(job))
#define SPLIT2 SPLIT2_VBMI2
#define SPLIT7 SPLIT7_VBMI2
#define BYTES BYTES_VBMI
#define TO_BF16 bf16_words
#include "fused512.h"
#endif
