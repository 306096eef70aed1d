// y = x W^T + bias, and the sweep over rows and panels that LoRA shares with it.
#pragma once

#include "abi.h"
#include "int8.h"
#include "team.h"

namespace pg {
namespace PG_ISA {

constexpr int VL = PG_LANES_PER_VECTOR;
constexpr int PanelWidth = 2;                    // vectors; the last panel of a layer may have one
constexpr int PanelColumns = PanelWidth * VL;
constexpr int MaxRows = PG_MAX_ROWS;             // rows x 2 sums, 2 weights and a value: what the registers hold

// Few rows take several panels at once, so that enough independent sums are in flight to hide the latency of fma.
constexpr int panels_at_once(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : rows <= 4 && VL == 16 ? 2 : 1; }

constexpr long TileStride = 4 * PanelColumns;    // floats per row of a tile's sums in memory
constexpr long MaxPassRows = 96;                 // rows that pass over a panel together

// What the inner loop reads activations as: bfloat16 only where an instruction multiplies it.
template <class T>
struct OperandOf {
    typedef float type;
};
#if PG_AVX512BF16
template <>
struct OperandOf<bf16> {
    typedef bf16 type;
};
#endif
template <class T>
using Operand = typename OperandOf<T>::type;

// `height` rows times `count` whole panels (or, if `narrow`, the last one of a single vector) into `to`.
template <class X, class W>
void panels_product(const X* x, long ldx, long height, const W* w, long panel, long depth, long count, bool narrow,
                    float* to, Ahead ahead) {
    with_count<MaxRows>(height, [&](auto rows) PG_ALWAYS {
        constexpr int Together = panels_at_once(rows);
        if (narrow)
            product<VL, rows, 1, 1>(x, ldx, w, panel, depth, to, TileStride, true, ahead);
        else if (Together > 1 && count == Together)
            product<VL, rows, Together, PanelWidth>(x, ldx, w, panel, depth, to, TileStride, true, ahead);
        else
            for (long p = 0; p < count; ++p)
                product<VL, rows, 1, PanelWidth>(x, ldx, w + p * panel, panel, depth, to + p * PanelColumns, TileStride,
                                                 true, ahead);
    });
}

// Tile i of `tiles` asks for its share of the panels that come next: several tiles of rows pass over a panel before it
// is their turn, and each line is asked for once.
inline Ahead ahead_of(const void* next, long bytes, long depth, long i, long tiles) {
    long lines = bytes / 64, stretches = (depth + Stretch - 1) / Stretch;
    long burst = (lines + tiles * stretches - 1) / (tiles * stretches), first = i * stretches * burst;
    return {static_cast<const char*>(next) + 64 * first, first < lines ? burst : 0};
}

// Panels [first, last) of W for `rows` rows of x; finish(row, column, sums) gets every vector of results once. `after`
// is what will be read when they are done, and is fetched panel by panel; if null, the panel that follows each.
template <class X, class W, class Finish>
void sweep(const X* x, long ldx, long rows, const W* w, long depth, long outputs, long first, long last,
           const W* after, const Finish& finish) {
    alignas(64) float sums[MaxRows * TileStride];
    long vectors = (outputs + VL - 1) / VL;
    long padded = depth + (sizeof(W) == sizeof(bf16) ? depth % 2 : 0), panel_size = padded * PanelColumns;
    long tiles = (rows + MaxRows - 1) / MaxRows;  // of equal height, as nearly as can be
    long together = panels_at_once(rows / tiles);
    for (long panel = first; panel < last; panel += together) {
        long count = last - panel < together ? last - panel : together;
        bool narrow = count == 1 && (panel + 1) * PanelWidth > vectors;
        if (!narrow && (panel + count) * PanelWidth > vectors) {  // leave the narrow panel to a turn of its own
            const W* rest = after ? after + (panel - first) * panel_size : nullptr;
            sweep(x, ldx, rows, w, depth, outputs, panel, panel + count - 1, rest, finish);
            sweep(x, ldx, rows, w, depth, outputs, panel + count - 1, panel + count, rest, finish);
            return;
        }
        long column = panel * PanelColumns, width = narrow ? 1 : count * PanelWidth;
        const W* here = w + column * padded;
        const W* next = after ? after + (panel - first) * panel_size : here + count * panel_size;
        for (long i = 0; i < tiles; ++i) {
            long row = rows * i / tiles, height = rows * (i + 1) / tiles - row;
            Ahead ahead;  // panels that pass side by side are streams that the processor follows by itself, and better
            if (together == 1) ahead = ahead_of(next, count * panel_size * sizeof(W), depth, i, tiles);
            panels_product(x + row * ldx, ldx, height, here, panel_size, depth, count, narrow, sums, ahead);
            for (long r = 0; r < height; ++r)
                for (long v = 0; v < width; ++v)
                    finish(row + r, column + v * VL, load<VL>(sums + r * TileStride + v * VL));
        }
    }
}

// The same for weights of 8 bits; T is what they are widened to.
template <class T, class X, class Finish>
void sweep_int8(const X* x, long ldx, long rows, const int8_t* w, long depth, long outputs, long first, long last,
                const Finish& finish) {
    if constexpr (sizeof(X) == sizeof(float))  // else the instruction for bfloat16 pairs must see both
        if (rows <= 4) return sweep<X, int8_t>(x, ldx, rows, w, depth, outputs, first, last, nullptr, finish);
    alignas(64) T wide[64 + PanelColumns * Int8Depth];  // room before the first, which add_masked may read
    alignas(64) float sums[MaxPassRows * PanelColumns];
    long vectors = (outputs + VL - 1) / VL, tiles = (rows + MaxRows - 1) / MaxRows;
    for (long panel = first; panel < last; ++panel) {
        long width = vectors - panel * PanelWidth < PanelWidth ? 1 : PanelWidth, column = panel * PanelColumns;
        for (long k = 0; k < depth; k += Int8Depth) {
            long steps = depth - k < Int8Depth ? depth - k : Int8Depth;
            const int8_t* from = w + column * depth + k * width * VL;
            widen_panel<VL>(from, steps, width, wide + 64);
            for (long i = 0; i < tiles; ++i) {
                long row = rows * i / tiles, height = rows * (i + 1) / tiles - row, size = steps * width * VL;
                with_count<MaxRows>(height, [&](auto height) PG_ALWAYS {
                    Ahead ahead = ahead_of(from + size, size, steps, i, tiles);
                    const X* at = x + row * ldx + k;
                    float* to = sums + row * PanelColumns;
                    auto narrow = product<VL, height, 1, 1, X, T>, whole = product<VL, height, 1, PanelWidth, X, T>;
                    (width == 1 ? narrow : whole)(at, ldx, wide + 64, 0, steps, to, PanelColumns, k == 0, ahead);
                });
            }
        }
        for (long r = 0; r < rows; ++r)
            for (long v = 0; v < width; ++v)
                finish(r, column + v * VL, load<VL>(sums + r * PanelColumns + v * VL));
    }
}

inline long panels_of(long outputs) { return (outputs + PanelColumns - 1) / PanelColumns; }

// Rows whose operands fit half of a core's second-level cache, so that they stay there while the panels pass.
inline long rows_per_pass(long depth) {
    long rows = 192 * 1024 / long(sizeof(float)) / depth / MaxRows * MaxRows;
    return rows < MaxRows ? MaxRows : rows > MaxPassRows ? MaxPassRows : rows;
}

// Shares one phase of work: x [rows, inputs] of operands -> y [rows, outputs].
template <class T, class Result>
void linear(Team& team, const Linear& layer, const Operand<T>* x, long ldx, long rows, Result* y, long ldy) {
    long pass = rows_per_pass(layer.inputs), panels = panels_of(layer.outputs), inputs = layer.inputs;
    long passes = (rows + pass - 1) / pass;
    long outputs = layer.outputs;
    const float *bias = layer.bias, *scale = layer.scale;
    team.share(passes * panels, rows <= 2 ? 4 : 1, [&](long begin, long end) {
        while (begin < end) {
            long first_row = begin / panels * pass, first = begin % panels;
            long last = first + (end - begin) < panels ? first + (end - begin) : panels;
            long height = rows - first_row < pass ? rows - first_row : pass;
            const Operand<T>* from = x + first_row * ldx;
            Result* out = y + first_row * ldy;
            auto finish = [=](long row, long column, Float<VL> sums) PG_ALWAYS {
                long left = outputs - column;
                if (bias) sums = sums + load<VL>(bias + column, left);
                store<VL>(out + row * ldy + column, sums, left);
            };
            if (scale)
                sweep_int8<T>(from, ldx, height, static_cast<const int8_t*>(layer.weight), inputs, outputs, first, last,
                              [=](long row, long column, Float<VL> sums) PG_ALWAYS {
                                  finish(row, column, sums * load<VL>(scale + column, outputs - column));
                              });
            else
                sweep<Operand<T>, T>(from, ldx, height, static_cast<const T*>(layer.weight), inputs, outputs, first,
                                     last, nullptr, finish);
            begin += last - first;
        }
    });
}

// Rows of operands lie a cache line apart from any power of two, lest they all fall into the same sets of the cache.
inline long operand_stride(long width) { return (width + 15) / 16 * 16 + 16; }

// Stores a result of type T the way the inner loop will read it.
template <class T, int L = VL>
PG_INLINE void put(Operand<T>* to, Float<L> x, long left) {
    store<L>(to, sizeof(T) == sizeof(Operand<T>) ? x : rounded<L, T>(x), left);
}

// x itself where it can be read as it is, else a copy in `scratch`, complete when this returns.
template <class T>
const Operand<T>* operands(Team& team, const T* x, long& ldx, long rows, long width, Operand<T>* scratch) {
    if constexpr (sizeof(T) == sizeof(Operand<T>)) {
        return x;
    } else {
        long stride = operand_stride(width);
        team.share_rows(rows, [&](long row) {
            for (long k = 0; k < width; k += VL)
                store<VL>(scratch + row * stride + k, load<VL>(x + row * ldx + k, width - k), width - k);
        });
        ldx = stride;
        team.wait();
        return scratch;
    }
}

}  // namespace PG_ISA
}  // namespace pg
