// Decoder layers, one or all of a step's, in one parallel region: the phases of the single operations, so the same
// bits.
#pragma once

#include "attention.h"
#include "lora.h"
#include "pointwise.h"

namespace pg {
namespace PG_ISA {

template <class T>
struct LayerCall {
    const Layer& layer;
    const Cache& cache;
    const Step& step;
    const float* rope;
    T* x;  // [rows, hidden], overwritten by the result

    static constexpr long Phases = 19;  // 4 linears of 3, attention of 2, 4 others, and add_rows after the last layer

    long rows() const { return step.rows; }
    long hidden() const { return layer.qkv.linear->inputs; }
    long qkv_width() const { return layer.qkv.linear->outputs; }
    long q_width() const { return layer.heads * cache.head_dim; }
    long intermediate() const { return layer.down.linear->inputs; }
    double effort() const {
        return double(rows()) * (hidden() * qkv_width() + 3.0 * hidden() * intermediate() + q_width() * hidden());
    }

    // Floats per row of what the inner loop reads, of wide results, and of shrunk rows.
    long operand_width() const { return largest_of(hidden(), largest_of(intermediate(), q_width())); }
    long wide_width() const { return largest_of(qkv_width(), 2 * intermediate()); }
    long rank() const {
        long most = 0;
        const LoraLinear* linears[] = {&layer.qkv, &layer.o, &layer.gate_up, &layer.down};
        for (const LoraLinear* l : linears)
            most = largest_of(most, l->bank ? shrunk_stride(*l->bank, step.groups) : 0);
        return most;
    }

    // Of the rows of q, k and v side by side.
    Attention attention(T* qkv) const {
        return {cache, step, {qkv, qkv_width(), cache.head_dim}, layer.heads, layer.window};
    }

    static long largest_of(long a, long b) { return a > b ? a : b; }
};

// Scratch memory of one call, enough for each of its layers, laid out once before the threads start.
template <class T>
struct LayerScratch {
    Operand<T>* operand;  // normalised rows, attention's output, or gated activations
    long ldo = 0;
    T* wide;  // qkv, then gate_up
    T* sum;   // what o and down add to the residual
    float* shrunk;
    Partials partials;  // all layers have the same heads

    // call(i) is the i-th of `count` LayerCalls.
    template <class Call>
    LayerScratch(long count, Call call) {
        size_t widest = 0, rank = 0;
        for (long i = 0; i < count; ++i) {
            LayerCall<T> each = call(i);
            ldo = each.largest_of(ldo, operand_stride(each.operand_width()));
            widest = each.largest_of(widest, each.wide_width());
            rank = each.largest_of(rank, each.rank());
        }
        LayerCall<T> first = call(0);
        size_t rows = first.rows();
        size_t sizes[5] = {rows * ldo * sizeof(Operand<T>), rows * widest * sizeof(T),
                           rows * first.hidden() * sizeof(T), lora_rows(first.step.groups) * rank * sizeof(float),
                           Partials::bytes(first.attention(nullptr))};
        size_t offsets[6] = {};
        for (int i = 0; i < 5; ++i) offsets[i + 1] = offsets[i] + (sizes[i] + 63) / 64 * 64;
        char* base = static_cast<char*>(pg_workspace(offsets[5]));
        operand = reinterpret_cast<Operand<T>*>(base);
        wide = reinterpret_cast<T*>(base + offsets[1]);
        sum = reinterpret_cast<T*>(base + offsets[2]);
        shrunk = reinterpret_cast<float*>(base + offsets[3]);
        partials = Partials(first.attention(nullptr), base + offsets[4]);
    }
};

// Everything between the qkv product and attention that concerns one row.
template <class T>
void place_row(const LayerCall<T>& call, T* qkv, long row) {
    const Cache& cache = call.cache;
    long dim = cache.head_dim, heads = call.layer.heads, kv_heads = cache.kv_heads;
    T* q = qkv + row * call.qkv_width();
    T* k = q + heads * dim;
    T* v = k + kv_heads * dim;
    if (call.layer.q_norm && call.layer.k_norm) {
        for (long h = 0; h < heads + kv_heads; ++h) {
            const void* weight = h < heads ? call.layer.q_norm : call.layer.k_norm;
            T* head = q + h * dim;
            rms_norm(head, static_cast<const T*>(weight), dim, call.layer.eps,
                     [=](long d, Float<VL> value, long left) PG_ALWAYS { store<VL>(head + d, value, left); });
        }
    }
    long position = call.step.positions[row];
    rotate_heads<T>({q, 0, dim}, 0, heads, position, call.rope, dim);
    rotate_heads<T>({k, 0, dim}, 0, kv_heads, position, call.rope, dim);
    for (long g = 0; g < kv_heads; ++g) store_kv(cache, call.step.slot_mapping[row], g, k + g * dim, v + g * dim);
}

// Operands of the next product: x normalised, after `sum` has been added to it (where something is there to add).
template <class T>
void norm_rows(Team& team, const LayerCall<T>& call, const void* weight, const LayerScratch<T>& scratch, bool add) {
    long width = call.hidden();
    team.share_rows(call.rows(), [&](long row) {
        T* x = call.x + row * width;
        Operand<T>* to = scratch.operand + row * scratch.ldo;
        if (add) add_row(x, scratch.sum + row * width, x, width);
        rms_norm(x, static_cast<const T*>(weight), width, call.layer.eps,
                 [=](long k, Float<VL> value, long left) PG_ALWAYS { put<T>(to + k, value, left); });
    });
    team.wait();
}

template <class T>
void multiply_rows(Team& team, const LayerCall<T>& call, const LoraLinear& linear, const LayerScratch<T>& scratch,
                   T* to) {
    lora_linear<T>(team, linear, call.step.groups, scratch.operand, scratch.ldo, call.rows(), to,
                   linear.linear->outputs, scratch.shrunk);
    team.wait();
}

// All but the last sum into x, which the next layer's norm_rows does with `add`, or add_rows.
template <class T>
void decoder_layer(Team& team, const LayerCall<T>& call, const LayerScratch<T>& scratch, bool add) {
    const Layer& layer = call.layer;
    long dim = call.cache.head_dim;
    norm_rows(team, call, layer.input_norm, scratch, add);
    multiply_rows(team, call, layer.qkv, scratch, scratch.wide);
    team.share_rows(call.rows(), [&](long row) { place_row(call, scratch.wide, row); });
    team.wait();
    Attention all = call.attention(scratch.wide);
    attention<T>(team, all, scratch.partials, [&](long row, long head, long d, auto value) PG_ALWAYS {
        constexpr int L = sizeof(value) / sizeof(float);
        put<T, L>(scratch.operand + row * scratch.ldo + head * dim + d, value, L);
    });
    team.wait();
    multiply_rows(team, call, layer.o, scratch, scratch.sum);
    norm_rows(team, call, layer.post_norm, scratch, true);
    multiply_rows(team, call, layer.gate_up, scratch, scratch.wide);
    long width = call.intermediate();
    team.share_rows(call.rows(), [&](long row) {
        const T* gate = scratch.wide + row * 2 * width;
        Operand<T>* to = scratch.operand + row * scratch.ldo;
        silu_mul(gate, gate + width, width,
                 [=](long k, Float<VL> value, long left) PG_ALWAYS { put<T>(to + k, value, left); });
    });
    team.wait();
    multiply_rows(team, call, layer.down, scratch, scratch.sum);
}

template <class T>
void add_rows(Team& team, const LayerCall<T>& call, const LayerScratch<T>& scratch) {
    team.share_rows(call.rows(), [&](long row) {
        T* x = call.x + row * call.hidden();
        add_row(x, scratch.sum + row * call.hidden(), x, call.hidden());
    });
}

}  // namespace PG_ISA
}  // namespace pg
