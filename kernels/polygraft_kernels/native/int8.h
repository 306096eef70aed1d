// Weights of 8 bits: W[n][k] = scale[n] * q[n][k]. They lie in panels as fp32 weights do, [k][Width][L], one byte each.
//
// Few rows multiply them as they are. For more, a stretch of k at a time is widened, exactly, into the panels that
// tile.h multiplies, and all tiles of rows share that. Every sum is the same chain either way. The scale multiplies the
// end of it.
#pragma once

#include "tile.h"

namespace pg {
namespace PG_ISA {

constexpr long Int8Depth = 192;  // k widened at once: they stay in the first-level cache

// `depth` steps of k, `vectors` vectors each.
template <int L>
PG_INLINE void widen_panel(const int8_t* q, long depth, long vectors, float* to) {
    for (long i = 0; i < depth * vectors; ++i) store<L>(to + i * L, load<L>(q + i * L));
}

// bfloat16 panels hold two k side by side; what is past an odd depth is zero.
template <int L>
PG_INLINE void widen_panel(const int8_t* q, long depth, long vectors, bf16* to) {
    typedef typename Lanes<L>::U U;
    for (long k = 0; k < depth; k += 2) {
        for (long v = 0; v < vectors; ++v) {
            const int8_t* at = q + (k * vectors + v) * L;
            U even = (U)load<L>(at) >> 16;
            U odd = k + 1 < depth ? (U)load<L>(at + vectors * L) : U{};
            U both = even | odd;
            memcpy(to + (k * vectors + v * 2) * L, &both, sizeof both);
        }
    }
}

}  // namespace PG_ISA
}  // namespace pg
