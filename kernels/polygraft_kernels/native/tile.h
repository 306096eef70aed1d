// The one inner loop of this library: a tile of Rows x (Panels * Width) vectors of sums, held in registers.
// `product` loads, runs and stores it; it is compiled once per shape and type, and everything else only calls it.
//
// linear, both halves of LoRA and both products of attention run it. Weights lie in panels of Width vectors of L
// output columns: fp32 as [k][Width][L], bfloat16 as [k / 2][Width][L][2], two consecutive k side by side. That is the
// operand order of vdpbf16ps; without it a mask gives the odd k as floats, and a shift the even ones.
//
// Every sum is one chain over ascending k, whatever the tile: a row's result cannot depend on its neighbours.
#pragma once

#include "vec.h"

// gcc likes to hoist the next step's loads above this one's arithmetic, and then runs out of registers: hide from it
// that what they are addressed by is still the same.
#define PG_LATER(address) asm volatile("" : "+r"(address))

namespace pg {
namespace PG_ISA {

template <int L>
PG_INLINE Float<L> even(typename Lanes<L>::U pairs) {
    return (Float<L>)(pairs << 16);
}

template <int L>
PG_INLINE Float<L> odd(typename Lanes<L>::U pairs) {
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

// What to ask the second-level cache for while a tile runs: `lines` cache lines from `from` on, every Stretch steps of
// k.
struct Ahead {
    const char* from = nullptr;
    long lines = 0;
};
constexpr long Stretch = 24;

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
    // W is float or int8_t.
    template <class W>
    PG_INLINE void add(const float* x, long ldx, const W* w, long panel, long depth, Ahead ahead) {
        in_stretches(depth, ahead, [&](long steps) PG_ALWAYS {
            for (long k = 0; k < steps; ++k) {
                step(x, ldx, [=](int v) PG_ALWAYS { return load<L>(w + offset(panel, v)); });
                x += 1;
                w += Width * L;
                PG_LATER(x);
            }
        });
    }

    PG_INLINE void add(const float* x, long ldx, const bf16* w, long panel, long depth, Ahead ahead) {
#if PG_FMA && !PG_AVX512
        if constexpr (L == 8 && Panels == 1 && Width == 2)
            add_masked(x, ldx, w, depth, ahead);
        else
#endif
            in_stretches(depth / 2 * 2, ahead, [&](long steps) PG_ALWAYS {
                for (long k = 0; k < steps; k += 2) {
                    step(x, ldx, [=](int v) PG_ALWAYS { return even<L>(pairs(w, panel, v)); });
                    PG_LATER(x);
                    step(x + 1, ldx, [=](int v) PG_ALWAYS { return odd<L>(pairs(w, panel, v)); });
                    x += 2;
                    w += 2 * Width * L;
                    PG_LATER(x);
                }
            });
        if (depth % 2 == 1)  // the other half of the last pair is never looked at
            step(x, ldx, [=](int v) PG_ALWAYS { return even<L>(pairs(w, panel, v)); });
    }

    PG_INLINE void add(const bf16* x, long ldx, const bf16* w, long panel, long depth, Ahead ahead) {
        in_stretches(depth / 2 * 2, ahead, [&](long steps) PG_ALWAYS {
            for (long k = 0; k < steps; k += 2) {
                step_pairs(w, panel, [=](int r) PG_ALWAYS {
                    uint32_t pair;
                    memcpy(&pair, x + r * ldx, sizeof pair);
                    return pair;
                });
                x += 2;
                w += 2 * Width * L;
            }
        });
        if (depth % 2 == 1) step_pairs(w, panel, [=](int r) PG_ALWAYS { return uint32_t(x[r * ldx].bits); });
    }

private:
    // f(steps) until `depth` steps are done, asking for what comes next in between: a few lines at a time, for a burst
    // of requests would hold up the loads of the tile itself.
    template <class F>
    static PG_INLINE void in_stretches(long depth, Ahead ahead, F f) {
        while (depth > 0) {
            for (long line = 0; line < ahead.lines; ++line) __builtin_prefetch(ahead.from + 64 * line, 0, 2);
            ahead.from += 64 * ahead.lines;
            long steps = depth < Stretch ? depth : Stretch;
            f(steps);
            depth -= steps;
        }
    }

#if PG_FMA && !PG_AVX512
    // 6 x 2 sums, two weights, a row's value and the mask are all 16 registers there are, and a neighbour on the same
    // core leaves room for about 3 instructions a cycle: two multiply-adds and one other. So a weight takes one
    // instruction, its load included: read 2 bytes earlier, the even k are where the mask expects the odd ones. (What
    // lies before the first weight may be read, but never counts.) And gcc must not copy sums from register to
    // register.
    PG_INLINE void add_masked(const float*& x, long ldx, const bf16*& w, long depth, Ahead ahead) {
        typename Lanes<L>::U mask = typename Lanes<L>::U{} + 0xffff0000u;
        asm("" : "+x"(mask));
        const char* rows[Rows];
        unroll<Rows>([&](auto r) PG_ALWAYS {
            rows[r] = reinterpret_cast<const char*>(x + r * ldx);
            asm("" : "+r"(rows[r]));
        });
        const char* weights = reinterpret_cast<const char*>(w);
        long i = 0;  // bytes of a row that are done
        in_stretches(depth / 2 * 2, ahead, [&](long steps) PG_ALWAYS {
            for (long end = i + 4 * steps; i < end; i += 8) {
                step_masked(rows, i, mask, weights + 8 * i - 2);
                PG_LATER(i);
                step_masked(rows, i + 4, mask, weights + 8 * i);
                PG_LATER(i);
            }
        });
        x += depth / 2 * 2;
        w += depth / 2 * 2 * Width * L;
    }

    PG_INLINE void step_masked(const char* const* rows, long i, typename Lanes<L>::U mask, const char* w) {
        Float<L> weights[Vecs];
        unroll<Vecs>([&](auto v) PG_ALWAYS {
            typename Lanes<L>::U both;
            memcpy(&both, w + v * sizeof both, sizeof both);
            weights[v] = (Float<L>)(both & mask);
        });
        unroll<Rows>([&](auto r) PG_ALWAYS {
            Float<L> value;
            asm("vbroadcastss %3, %2\n\tvfmadd231ps %4, %2, %0\n\tvfmadd231ps %5, %2, %1"
                : "+x"(sums[r][0]), "+x"(sums[r][1]), "=&x"(value)
                : "m"(*reinterpret_cast<const float*>(rows[r] + i)), "x"(weights[0]), "x"(weights[1]));
        });
    }
#endif

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
                                       bool fresh, Ahead ahead = {}) {
    Tile<L, Rows, Panels, Width> tile;
    if (fresh)
        tile.each([&](auto r, auto v) PG_ALWAYS { tile.sums[r][v] = Float<L>{}; });
    else
        tile.each([&](auto r, auto v) PG_ALWAYS { tile.sums[r][v] = load<L>(to + r * ldt + v * L); });
    tile.add(x, ldx, w, panel, depth, ahead);
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
