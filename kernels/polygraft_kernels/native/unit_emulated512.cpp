// The code of unit_avx512bf16 in AVX2 instructions, vdpbf16ps replaced by two fused multiply-adds. For tests only.
#if defined(__x86_64__)
#pragma GCC target("avx2,fma")
#define PG_ISA emulated512
#define PG_LANES_PER_VECTOR 16
#define PG_MAX_ROWS 3
#define PG_FMA 1
#define PG_AVX512 0
#define PG_AVX512BF16 1
#include "exports.h"
#endif
