// x86-64 with AVX2 and FMA (2013 on): 16 registers of 8 floats.
#if defined(__x86_64__)
#pragma GCC target("avx2,fma")
#define PG_ISA avx2
#define PG_LANES_PER_VECTOR 8
#define PG_MAX_ROWS 6
#define PG_FMA 1
#define PG_AVX512 0
#define PG_AVX512BF16 0
#include "exports.h"
#endif
