// Row by row: RMS norm, rotary embedding, gated activation, residual sum.
#pragma once

#include <math.h>

#include "linear.h"

namespace pg {
namespace PG_ISA {

// 1 / sqrt(mean(x^2) + eps). The lanes' partial sums make the order of additions the same for every caller.
template <class T>
PG_INLINE float inverse_rms(const T* x, long width, double eps) {
    Float<VL> squares = {};
    for (long k = 0; k < width; k += VL) {
        Float<VL> value = load<VL>(x + k, width - k);
        squares = fma<VL>(value, value, squares);
    }
    return 1.0f / sqrtf(sum<VL>(squares) / float(width) + float(eps));
}

// finish(k, value, left) for every vector of the normalised row.
template <class T, class Finish>
PG_INLINE void rms_norm(const T* x, const T* weight, long width, double eps, Finish finish) {
    Float<VL> scale = splat<VL>(inverse_rms(x, width, eps));
    for (long k = 0; k < width; k += VL) {
        long left = width - k;
        finish(k, load<VL>(x + k, left) * scale * load<VL>(weight + k, left), left);
    }
}

// One head, in place: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), `half` of each.
template <class T>
PG_INLINE void rotate(T* head, const float* cos, const float* sin, long half) {
    for (long d = 0; d < half; d += VL) {
        long left = half - d;
        Float<VL> x1 = load<VL>(head + d, left), x2 = load<VL>(head + half + d, left);
        Float<VL> c = load<VL>(cos + d, left), s = load<VL>(sin + d, left);
        store<VL>(head + d, x1 * c - x2 * s, left);
        store<VL>(head + half + d, x2 * c + x1 * s, left);
    }
}

template <class T>
void rotate_heads(const Heads& heads, long row, long count, long position, const float* table, long head_dim) {
    const float* cos = table + position * head_dim;
    T* first = static_cast<T*>(heads.data) + row * heads.row;
    for (long h = 0; h < count; ++h) rotate(first + h * heads.head, cos, cos + head_dim / 2, head_dim / 2);
}

// silu(gate) * up, with silu(g) = g / (1 + e^-g).
template <class T, class Finish>
PG_INLINE void silu_mul(const T* gate, const T* up, long width, Finish finish) {
    for (long k = 0; k < width; k += VL) {
        long left = width - k;
        Float<VL> g = load<VL>(gate + k, left);
        finish(k, g / (exp<VL>(-g) + 1.0f) * load<VL>(up + k, left), left);
    }
}

template <class T>
PG_INLINE void add_row(const T* a, const T* b, T* to, long width) {
    for (long k = 0; k < width; k += VL) {
        long left = width - k;
        store<VL>(to + k, load<VL>(a + k, left) + load<VL>(b + k, left), left);
    }
}

}  // namespace PG_ISA
}  // namespace pg
