// The one inner loop of this library: a tile of Rows x (Panels * Width) vectors of sums, held in registers.
// `product` loads, runs and stores it; it is compiled once per shape and type, and everything else only calls it.
//
// linear, both halves of LoRA and both products of attention run it. Weights lie in panels of Width vectors of L
// output columns: fp32 as [k][Width][L], bfloat16 as [k / 2][Width][L][2], two consecutive k side by side. That is the
// operand order of vdpbf16ps; without it one shift gives the even k and one mask the odd k as floats.
//
// Every sum is one chain over ascending k, whatever the tile: a row's result cannot depend on its neighbours.
#pragma once

#include "vec.h"

// gcc likes to hoist the next step's loads above this one's arithmetic, and then runs out of registers: hide from it
// that the pointer they go through is still the same.
#define PG_LATER(pointer) asm volatile("" : "+r"(pointer))

namespace pg {
namespace PG_ISA {

template <int L>
PG_INLINE Float<L> even(typename Lanes<L>::U pairs) {
    return (Float<L>)(pairs << 16);
}

template <int L>
PG_INLINE Float<L> odd(typename Lanes<L>::U pairs) {
#if PG_FMA && !PG_AVX512
    // A tile of 6 x 2 sums, two weights and a row's value fill all 16 registers: this keeps the mask in memory, where
    // gcc would take a register for it and spill a sum instead (a third of the speed).
    if constexpr (L == 8) {
        static const typename Lanes<L>::U mask = typename Lanes<L>::U{} + 0xffff0000u;
        asm("vpand %2, %1, %0" : "=x"(pairs) : "x"(pairs), "m"(mask));
        return (Float<L>)pairs;
    }
#endif
    return (Float<L>)(pairs & 0xffff0000u);
}

// sum + even * even' + odd * odd' of bfloat16 pairs, the odd product first as vdpbf16ps does it.
template <int L>
PG_INLINE Float<L> dot_pairs(Float<L> sum, typename Lanes<L>::U a, typename Lanes<L>::U b) {
#if PG_AVX512BF16 && PG_AVX512
    if constexpr (L == 16) return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#endif
    sum = fma<L>(odd<L>(a), odd<L>(b), sum);
    return fma<L>(even<L>(a), even<L>(b), sum);
}

template <int L, int Rows, int Panels, int Width>
struct Tile {
    static constexpr int Vecs = Panels * Width;
    Float<L> sums[Rows][Vecs];

    // f(row, vector) over the tile. Only constant indices ever touch `sums`: else gcc would keep it in memory.
    template <class F>
    static PG_INLINE void each(F f) {
        unroll<Rows>([&](auto r) PG_ALWAYS { unroll<Vecs>([&](auto v) PG_ALWAYS { f(r, v); }); });
    }

    // sums[r][v] += sum over k of x[r * ldx + k] * W[k][v]; `panel` is the distance of two panels in elements.
    PG_INLINE void add(const float* x, long ldx, const float* w, long panel, long depth) {
        for (long k = 0; k < depth; ++k) {
            prefetch(w, panel);
            step(x, ldx, [=](int v) PG_ALWAYS { return load<L>(w + offset(panel, v)); });
            x += 1;
            w += Width * L;
            PG_LATER(x);
        }
    }

    PG_INLINE void add(const float* x, long ldx, const bf16* w, long panel, long depth) {
        for (long k = 0; k + 1 < depth; k += 2) {
            prefetch(w, panel);
            step(x, ldx, [=](int v) PG_ALWAYS { return even<L>(pairs(w, panel, v)); });
            PG_LATER(x);
            step(x + 1, ldx, [=](int v) PG_ALWAYS { return odd<L>(pairs(w, panel, v)); });
            x += 2;
            w += 2 * Width * L;
            PG_LATER(x);
        }
        if (depth % 2 == 1)  // the other half of the last pair is never looked at
            step(x, ldx, [=](int v) PG_ALWAYS { return even<L>(pairs(w, panel, v)); });
    }

    PG_INLINE void add(const bf16* x, long ldx, const bf16* w, long panel, long depth) {
        for (long k = 0; k + 1 < depth; k += 2) {
            prefetch(w, panel);
            step_pairs(w, panel, [=](int r) PG_ALWAYS {
                uint32_t pair;
                memcpy(&pair, x + r * ldx + k, sizeof pair);
                return pair;
            });
            w += 2 * Width * L;
        }
        if (depth % 2 == 1) step_pairs(w, panel, [=](int r) PG_ALWAYS { return uint32_t(x[r * ldx + depth - 1].bits); });
    }

private:
    // Asks for the same place in the panels that come next, into the second-level cache: several tiles of rows pass over
    // a panel before it is the next one's turn. Only weights come in wide panels; attention looks after its own blocks.
    template <class W>
    static PG_INLINE void prefetch(const W* w, long panel) {
        constexpr long StepBytes = Width * L * 4, Line = 64;
        if constexpr (Width > 1)
            for (int p = 0; p < Panels; ++p)
                for (long byte = 0; byte < StepBytes; byte += Line)
                    __builtin_prefetch(w + (Panels + p) * panel + byte / long(sizeof(W)), 0, 2);
    }

    static PG_INLINE long offset(long panel, int v) { return (v / Width) * panel + (v % Width) * L; }

    static PG_INLINE typename Lanes<L>::U pairs(const bf16* w, long panel, int v) {
        typename Lanes<L>::U both;
        memcpy(&both, w + (v / Width) * panel + (v % Width) * 2 * L, sizeof both);
        return both;
    }

    // One k. What there is less of stays in registers: the weights, or the rows' values.
    template <class Weight>
    PG_INLINE void step(const float* x, long ldx, Weight weight) {
        if constexpr (Rows > Vecs) {
            Float<L> weights[Vecs];
            unroll<Vecs>([&](auto v) PG_ALWAYS { weights[v] = weight(v); });
            unroll<Rows>([&](auto r) PG_ALWAYS {
                Float<L> value = splat<L>(x[r * ldx]);
                unroll<Vecs>([&](auto v) PG_ALWAYS { sums[r][v] = fma<L>(value, weights[v], sums[r][v]); });
            });
        } else {
            Float<L> values[Rows];
            unroll<Rows>([&](auto r) PG_ALWAYS { values[r] = splat<L>(x[r * ldx]); });
            unroll<Vecs>([&](auto v) PG_ALWAYS {
                Float<L> one = weight(v);
                unroll<Rows>([&](auto r) PG_ALWAYS { sums[r][v] = fma<L>(values[r], one, sums[r][v]); });
            });
        }
    }

    // Two k at once.
    template <class Pair>
    PG_INLINE void step_pairs(const bf16* w, long panel, Pair pair) {
        typename Lanes<L>::U weights[Vecs];
        unroll<Vecs>([&](auto v) PG_ALWAYS { weights[v] = pairs(w, panel, v); });
        unroll<Rows>([&](auto r) PG_ALWAYS {
            typename Lanes<L>::U both = typename Lanes<L>::U{} + pair(r);
            unroll<Vecs>([&](auto v) PG_ALWAYS { sums[r][v] = dot_pairs<L>(sums[r][v], both, weights[v]); });
        });
    }
};

// to[r][v] = (fresh ? 0 : to[r][v]) + sum over k of x[r][k] * W[k][v], rows of `to` `ldt` floats apart.
template <int L, int Rows, int Panels, int Width, class X, class W>
__attribute__((noinline)) void product(const X* x, long ldx, const W* w, long panel, long depth, float* to, long ldt,
                                       bool fresh) {
    Tile<L, Rows, Panels, Width> tile;
    if (fresh)
        tile.each([&](auto r, auto v) PG_ALWAYS { tile.sums[r][v] = Float<L>{}; });
    else
        tile.each([&](auto r, auto v) PG_ALWAYS { tile.sums[r][v] = load<L>(to + r * ldt + v * L); });
    tile.add(x, ldx, w, panel, depth);
    tile.each([&](auto r, auto v) PG_ALWAYS { store<L>(to + r * ldt + v * L, tile.sums[r][v]); });
}

// Calls f(Index<n>) for a run-time n in 1 .. Most.
template <int Most, class F>
PG_INLINE void with_count(long n, F f) {
    if constexpr (Most > 1) {
        if (n < Most) return with_count<Most - 1>(n, f);
    }
    f(Index<Most>());
}

}  // namespace PG_ISA
}  // namespace pg
