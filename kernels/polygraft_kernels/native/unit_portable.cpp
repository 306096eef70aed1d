// Any processor: the instructions that every compiler target has.
#define PG_ISA portable
#define PG_LANES_PER_VECTOR 4
#define PG_MAX_ROWS 6
#define PG_FMA 0
#define PG_AVX512 0
#define PG_AVX512BF16 0
#include "exports.h"
