// y[t, segment] += scale * B (A x[t]) for rows grouped by slot. Base rows lie before the first group: never looked at.
//
// Shrinking multiplies a group's rows with all of its slot's A matrices at once; expanding adds each segment's product
// into y. Both are sweeps of tile.h's loop over exactly the slot's own rank.
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

// Floats per row between shrink and expand: the largest rank of the step's slots, in whole vectors.
inline long shrunk_stride(const LoraBank& bank, const LoraGroups& groups) {
    long rank = 0;
    for (long g = 0; g < groups.count; ++g) {
        long r = bank.slots[groups.slots[g]].rank;
        rank = r > rank ? r : rank;
    }
    return (rank + VL - 1) / VL * VL;
}

inline long lora_rows(const LoraGroups& groups) {
    return groups.count == 0 ? 0 : groups.starts[groups.count] - groups.starts[0];
}

// Shares one phase of work: shrunk = A x.
template <class T>
void lora_shrink(Team& team, const LoraPlan& plan, const Operand<T>* x, long ldx) {
    constexpr long Portion = 4;  // panels: few rows take several at once
    auto portions = [&](long g) {
        return plan.rows(g) == 0 ? 0 : (panels_of(plan.slot(g).rank) + Portion - 1) / Portion;
    };
    team.share_ragged(plan.groups.count, portions, [&](long g, long portion) {
        const LoraSlot& slot = plan.slot(g);
        long row = plan.groups.starts[g], stride = plan.stride, panels = panels_of(slot.rank);
        long first = portion * Portion, last = first + Portion < panels ? first + Portion : panels;
        float* out = plan.shrunk + (row - plan.groups.starts[0]) * stride;
        bool more = last == panels && g + 1 < plan.groups.count;
        sweep(x + row * ldx, ldx, plan.rows(g), static_cast<const T*>(slot.a), plan.bank.inputs, slot.rank, first, last,
              static_cast<const T*>(more ? plan.slot(g + 1).a : nullptr),
              [=](long r, long column, Float<VL> sums) PG_ALWAYS { store<VL>(out + r * stride + column, sums); });
    });
}

// Shares one phase of work: y += scale * B shrunk, rounded to y's type once.
template <class T>
void lora_expand(Team& team, const LoraPlan& plan, T* y, long ldy) {
    constexpr long Portion = 8;  // panels
    long segments = plan.bank.num_segments, owners = plan.groups.count * segments;
    auto portions = [&](long owner) {
        long g = owner / segments, s = owner % segments;
        bool absent = plan.rows(g) == 0 || plan.segment(g, s).rank == 0;
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
        long padded = segment.rank + (sizeof(T) == sizeof(bf16) ? segment.rank % 2 : 0);
        const void* next = last < panels         ? b + last * PanelColumns * padded
                           : owner + 1 < owners ? plan.segment((owner + 1) / segments, (owner + 1) % segments).b
                                                : nullptr;
        T* out = y + row * ldy + first_column;
        Float<VL> scale = splat<VL>(float(segment.scale));
        sweep(plan.shrunk + (row - plan.groups.starts[0]) * plan.stride + first_rank, plan.stride, plan.rows(g), b,
              segment.rank, width, first, last, static_cast<const T*>(next),
              [=](long r, long column, Float<VL> sums) PG_ALWAYS {
                  T* at = out + r * ldy + column;
                  long left = width - column;
                  store<VL>(at, fma<VL>(scale, sums, load<VL>(at, left)), left);
              });
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
