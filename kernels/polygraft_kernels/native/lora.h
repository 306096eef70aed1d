// y[t, segment] = gain * (y[t, segment] + scale * B (A x[t])) + shift for rows grouped by slot. Base rows lie before the
// first group: never looked at.
//
// Shrinking multiplies a group's rows with all of its slot's A matrices at once; expanding adds each segment's product
// into y. Both are sweeps of tile.h's loop over exactly the slot's own rank. Gain and shift, where a segment has them,
// are applied to each vector of results before it is stored; without a pair they are a pass of their own.
#pragma once

#include "linear.h"

namespace pg {
namespace PG_ISA {

struct LoraPlan {
    const LoraBank& bank;
    const LoraGroups& groups;
    float* shrunk;  // [rows, stride], row t of the step at t - starts[0]
    long stride;

    const LoraSlot& slot(long group) const { return bank.slots[groups.slots[group]]; }
    const LoraSegment& segment(long group, long s) const {
        return bank.segments[groups.slots[group] * bank.num_segments + s];
    }
    long rows(long group) const { return groups.starts[group + 1] - groups.starts[group]; }
};

inline bool has_affine(const LoraSegment& segment) { return segment.gain || segment.shift; }

// gain * y + shift for the vector that begins at `column` of its segment, which has `left` columns from there on.
PG_INLINE Float<VL> affine(const LoraSegment& segment, long column, long left, Float<VL> y) {
    if (!segment.shift) return y * load<VL>(segment.gain + column, left);
    Float<VL> shift = load<VL>(segment.shift + column, left);
    return segment.gain ? fma<VL>(y, load<VL>(segment.gain + column, left), shift) : y + shift;
}

// Floats per row between shrink and expand: the largest rank of the step's slots, in whole vectors.
inline long shrunk_stride(const LoraBank& bank, const LoraGroups& groups) {
    long rank = 0;
    for (long g = 0; g < groups.count; ++g) {
        long r = bank.slots[groups.slots[g]].rank;
        rank = r > rank ? r : rank;
    }
    return (rank + VL - 1) / VL * VL;
}

// Whether any of the step's slots scales or moves what it adds to.
inline bool any_affine(const LoraBank& bank, const LoraGroups& groups) {
    for (long g = 0; g < groups.count; ++g)
        for (long s = 0; s < bank.num_segments; ++s)
            if (has_affine(bank.segments[groups.slots[g] * bank.num_segments + s])) return true;
    return false;
}

inline long lora_rows(const LoraGroups& groups) {
    return groups.count == 0 ? 0 : groups.starts[groups.count] - groups.starts[0];
}

// Shares one phase of work: shrunk = A x.
template <class T>
void lora_shrink(Team& team, const LoraPlan& plan, const Operand<T>* x, long ldx) {
    constexpr long Portion = 4;  // panels: few rows take several at once
    auto portions = [&](long g) { return (panels_of(plan.slot(g).rank) + Portion - 1) / Portion; };
    // A small rank is one portion: the rows are shared, too, or one thread would do all of a group.
    auto blocks = [&](long g) {
        long rows = plan.rows(g), least = rows / 4 < team.size ? rows / 4 : team.size;
        long needed = (rows + 4 * MaxRows - 1) / (4 * MaxRows);
        return needed > least ? needed : least;
    };
    team.share_ragged(plan.groups.count, [&](long g) { return blocks(g) * portions(g); }, [&](long g, long piece) {
        const LoraSlot& slot = plan.slot(g);
        long parts = blocks(g), part = piece % parts, first = piece / parts * Portion, panels = panels_of(slot.rank);
        long top = plan.rows(g) * part / parts, rows = plan.rows(g) * (part + 1) / parts - top;
        long row = plan.groups.starts[g] + top, stride = plan.stride;
        long last = first + Portion < panels ? first + Portion : panels;
        float* out = plan.shrunk + (row - plan.groups.starts[0]) * stride;
        bool more = last == panels && part + 1 == parts && g + 1 < plan.groups.count;
        sweep(x + row * ldx, ldx, rows, static_cast<const T*>(slot.a), plan.bank.inputs, slot.rank, first, last,
              static_cast<const T*>(more ? plan.slot(g + 1).a : nullptr),
              [=](long r, long column, Float<VL> sums) PG_ALWAYS { store<VL>(out + r * stride + column, sums); });
    });
}

// Shares one phase of work: y = gain * (y + scale * B shrunk) + shift, rounded to y's type once.
template <class T>
void lora_expand(Team& team, const LoraPlan& plan, T* y, long ldy) {
    constexpr long Portion = 8;  // panels
    long segments = plan.bank.num_segments, owners = plan.groups.count * segments;
    auto portions = [&](long owner) {
        long g = owner / segments, s = owner % segments;
        const LoraSegment& segment = plan.segment(g, s);
        bool absent = plan.rows(g) == 0 || (segment.rank == 0 && !has_affine(segment));
        return absent ? 0 : (panels_of(plan.bank.widths[s]) + Portion - 1) / Portion;
    };
    team.share_ragged(owners, portions, [&](long owner, long portion) {
        long g = owner / segments, s = owner % segments, first_rank = 0, first_column = 0;
        for (long before = 0; before < s; ++before) {
            first_rank += plan.segment(g, before).rank;
            first_column += plan.bank.widths[before];
        }
        const LoraSegment& segment = plan.segment(g, s);
        const T* b = static_cast<const T*>(segment.b);
        long width = plan.bank.widths[s], panels = panels_of(width), row = plan.groups.starts[g];
        long first = portion * Portion, last = first + Portion < panels ? first + Portion : panels;
        T* out = y + row * ldy + first_column;
        if (segment.rank == 0) {
            long end = last * PanelColumns < width ? last * PanelColumns : width;
            for (long r = 0; r < plan.rows(g); ++r)
                for (long column = first * PanelColumns; column < end; column += VL) {
                    T* at = out + r * ldy + column;
                    long left = width - column;
                    store<VL>(at, affine(segment, column, left, load<VL>(at, left)), left);
                }
            return;
        }
        long padded = segment.rank + (sizeof(T) == sizeof(bf16) ? segment.rank % 2 : 0);
        const void* next = last < panels         ? b + last * PanelColumns * padded
                           : owner + 1 < owners ? plan.segment((owner + 1) / segments, (owner + 1) % segments).b
                                                : nullptr;
        Float<VL> scale = splat<VL>(float(segment.scale));
        auto expand = [&](auto finish) PG_ALWAYS {
            sweep(plan.shrunk + (row - plan.groups.starts[0]) * plan.stride + first_rank, plan.stride, plan.rows(g), b,
                  segment.rank, width, first, last, static_cast<const T*>(next),
                  [=](long r, long column, Float<VL> sums) PG_ALWAYS {
                      T* at = out + r * ldy + column;
                      long left = width - column;
                      store<VL>(at, finish(column, left, fma<VL>(scale, sums, load<VL>(at, left))), left);
                  });
        };
        if (has_affine(segment))  // a loop of its own, lest the others ask for every vector
            expand([&](long column, long left, Float<VL> sum) PG_ALWAYS { return affine(segment, column, left, sum); });
        else
            expand([](long, long, Float<VL> sum) PG_ALWAYS { return sum; });
    });
}

// linear, and the deltas of every adapter of the step. Expanding waits for linear and shrinking; the caller waits.
template <class T>
void lora_linear(Team& team, const LoraLinear& layer, const LoraGroups& groups, const Operand<T>* x, long ldx,
                 long rows, T* y, long ldy, float* shrunk) {
    linear<T>(team, *layer.linear, x, ldx, rows, y, ldy);
    if (layer.bank == nullptr || groups.count == 0) return;
    LoraPlan plan{*layer.bank, groups, shrunk, shrunk_stride(*layer.bank, groups)};
    lora_shrink<T>(team, plan, x, ldx);
    team.wait();
    lora_expand<T>(team, plan, y, ldy);
}

}  // namespace PG_ISA
}  // namespace pg
