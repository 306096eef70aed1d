// Where a key or value lies inside its block, so that attention reads both as tile.h's panels (one vector wide).
//
// Keys:   [block_size / L][D] vectors of L tokens: scores of L keys at once, summed over d.
// Values: [D / L][block_size] vectors of L features: outputs of L features at once, summed over tokens.
// In bfloat16 two consecutive d (keys) or tokens (values) lie side by side, as in every panel.
#pragma once

#include "abi.h"
#include "vec.h"

namespace pg {
namespace PG_ISA {

// Index of (step k, lane) in a panel one vector wide.
template <class T>
PG_INLINE long in_panel(long k, long lane, long lanes) {
    return sizeof(T) == 2 ? (k / 2 * lanes + lane) * 2 + k % 2 : k * lanes + lane;
}

template <class T>
PG_INLINE T* block_of(void* base, const Cache& cache, long block, long head) {
    return static_cast<T*>(base) + (block * cache.kv_heads + head) * cache.block_size * cache.head_dim;
}

template <class T>
void store_kv(const Cache& cache, long slot, long head, const T* key, const T* value) {
    long block = slot / cache.block_size, token = slot % cache.block_size;
    long lanes = cache.lanes, dim = cache.head_dim;
    T* keys = block_of<T>(cache.keys, cache, block, head) + token / lanes * lanes * dim;
    for (long d = 0; d < dim; ++d) keys[in_panel<T>(d, token % lanes, lanes)] = key[d];
    T* values = block_of<T>(cache.values, cache, block, head);
    for (long first = 0; first < dim; first += lanes) {
        T* panel = values + first * cache.block_size;
        for (long lane = 0; lane < lanes; ++lane) panel[in_panel<T>(token, lane, lanes)] = value[first + lane];
    }
}

}  // namespace PG_ISA
}  // namespace pg
