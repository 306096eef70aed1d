// x86-64 with AVX-512: 32 registers of 16 floats.
#if defined(__x86_64__)
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")
#define PG_ISA avx512
#define PG_LANES_PER_VECTOR 16
#define PG_MAX_ROWS 8
#define PG_FMA 1
#define PG_AVX512 1
#define PG_AVX512BF16 0
#include "exports.h"
#endif
