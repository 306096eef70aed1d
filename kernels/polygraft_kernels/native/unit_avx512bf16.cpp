// x86-64 with AVX-512 and its bfloat16 dot product: activations stay bfloat16, vdpbf16ps multiplies pairs.
#if defined(__x86_64__)
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")
#define PG_ISA avx512bf16
#define PG_LANES_PER_VECTOR 16
#define PG_MAX_ROWS 8
#define PG_FMA 1
#define PG_AVX512 1
#define PG_AVX512BF16 1
#include "exports.h"
#endif
