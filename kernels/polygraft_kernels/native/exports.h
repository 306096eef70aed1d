// The C functions of one instruction set, named pg_<isa>_<operation>_<type>. Included last by every unit.
#pragma once

#include "layer.h"
#include "probe.h"
#include "sample.h"

#define PG_PASTE(isa, name, type) pg_##isa##_##name##_##type
#define PG_NAME(isa, name, type) PG_PASTE(isa, name, type)
#define PG_EXPORT extern "C" __attribute__((visibility("default")))

namespace pg {
namespace PG_ISA {

template <class T, class Result>
void linear_call(const Linear& layer, const T* x, long ldx, long rows, Result* y, long threads) {
    Operand<T>* scratch = nullptr;
    if (sizeof(T) != sizeof(Operand<T>))
        scratch = static_cast<Operand<T>*>(
            pg_workspace(rows * operand_stride(layer.inputs) * sizeof(Operand<T>)));
    run(threads, double(rows) * layer.inputs * layer.outputs, 2, [&](Team& team) {
        long ld = ldx;
        const Operand<T>* from = operands(team, x, ld, rows, layer.inputs, scratch);
        linear<T>(team, layer, from, ld, rows, y, layer.outputs);
    });
}

template <class T>
void lora_call(const LoraBank& bank, const LoraGroups& groups, const T* x, long ldx, T* y, long ldy, long threads) {
    long rows = lora_rows(groups), stride = shrunk_stride(bank, groups), outputs = 0;
    if (rows == 0 || (stride == 0 && !any_affine(bank, groups))) return;
    for (long s = 0; s < bank.num_segments; ++s) outputs += bank.widths[s];
    size_t copied = sizeof(T) == sizeof(Operand<T>) ? 0 : rows * operand_stride(bank.inputs) * sizeof(Operand<T>);
    char* scratch = static_cast<char*>(pg_workspace(copied + rows * stride * sizeof(float)));
    LoraPlan plan{bank, groups, reinterpret_cast<float*>(scratch + copied), stride};
    run(threads, double(rows) * (stride * (bank.inputs + outputs) + outputs), 3, [&](Team& team) {
        long ld = ldx, first = groups.starts[0];
        if (stride > 0) {
            const Operand<T>* from =
                operands(team, x + first * ldx, ld, rows, bank.inputs, reinterpret_cast<Operand<T>*>(scratch));
            lora_shrink<T>(team, plan, from - first * ld, ld);
            team.wait();
        }
        lora_expand<T>(team, plan, y, ldy);
    });
}

template <class T>
void attention_call(const Cache& cache, const Step& step, const Heads& queries, long heads, long window, T* out,
                    long threads) {
    Attention all{cache, step, queries, heads, window};
    long dim = cache.head_dim;
    double effort = 0;
    for (long s = 0; s < step.sequences; ++s) effort += 2.0 * all.queries_of(s) * cache.kv_heads * all.context(s) * dim;
    Partials partials(all, pg_workspace(Partials::bytes(all)));
    run(threads, effort, 2, [&](Team& team) {
        attention<T>(team, all, partials, [&](long row, long head, long d, auto value) PG_ALWAYS {
            store<sizeof(value) / sizeof(float)>(out + (row * heads + head) * dim + d, value);
        });
    });
}

template <class T>
void store_kv_call(const Cache& cache, const Heads& keys, const Heads& values, const int64_t* slots, long rows) {
    for (long row = 0; row < rows; ++row)
        for (long g = 0; g < cache.kv_heads; ++g)
            store_kv(cache, slots[row], g, static_cast<const T*>(keys.data) + row * keys.row + g * keys.head,
                     static_cast<const T*>(values.data) + row * values.row + g * values.head);
}

template <class T>
void rms_norm_call(const Heads& x, const T* weight, long rows, long heads, long width, double eps, T* out,
                   long threads) {
    run(threads, double(rows) * heads * width, 1, [&](Team& team) {
        team.share_rows(rows * heads, [&](long i) {
            T* to = out + i * width;
            rms_norm(static_cast<const T*>(x.data) + i / heads * x.row + i % heads * x.head, weight, width, eps,
                     [=](long k, Float<VL> value, long left) PG_ALWAYS { store<VL>(to + k, value, left); });
        });
    });
}

template <class T>
void rope_call(const Heads& q, long heads, const Heads& k, long kv_heads, const int64_t* positions, long rows,
               const float* table, long dim) {
    for (long row = 0; row < rows; ++row) {
        rotate_heads<T>(q, row, heads, positions[row], table, dim);
        rotate_heads<T>(k, row, kv_heads, positions[row], table, dim);
    }
}

template <class T>
void silu_mul_call(const T* gate_up, long ld, long rows, long width, T* out, long threads) {
    run(threads, double(rows) * width * 4, 1, [&](Team& team) {
        team.share_rows(rows, [&](long row) {
            const T* gate = gate_up + row * ld;
            T* to = out + row * width;
            silu_mul(gate, gate + width, width,
                     [=](long k, Float<VL> value, long left) PG_ALWAYS { store<VL>(to + k, value, left); });
        });
    });
}

template <class T>
void decoder_call(const Layer* const* layers, const Cache* const* caches, long count, const Step& step,
                  const float* rope, T* x, long threads) {
    auto call = [&](long i) { return LayerCall<T>{*layers[i], *caches[i], step, rope, x}; };
    LayerScratch<T> scratch(count, call);
    run(threads, call(0).effort(), LayerCall<T>::Phases * count, [&](Team& team) {
        for (long i = 0; i < count; ++i) decoder_layer(team, call(i), scratch, i > 0);
        add_rows(team, call(count - 1), scratch);
    });
}

}  // namespace PG_ISA
}  // namespace pg

using pg::bf16;

#define PG_EXPORT_TYPE(T, type)                                                                                     \
    PG_EXPORT void PG_NAME(PG_ISA, linear, type)(const pg::Linear* layer, const T* x, int64_t ldx, int64_t rows,    \
                                                 T* y, int64_t threads) {                                           \
        pg::PG_ISA::linear_call<T>(*layer, x, ldx, rows, y, threads);                                               \
    }                                                                                                               \
    PG_EXPORT void PG_NAME(PG_ISA, logits, type)(const pg::Linear* layer, const T* x, int64_t ldx, int64_t rows,    \
                                                 float* y, int64_t threads) {                                       \
        pg::PG_ISA::linear_call<T>(*layer, x, ldx, rows, y, threads);                                               \
    }                                                                                                               \
    PG_EXPORT void PG_NAME(PG_ISA, lora, type)(const pg::LoraBank* bank, const pg::LoraGroups* groups, const T* x,  \
                                               int64_t ldx, T* y, int64_t ldy, int64_t threads) {                   \
        pg::PG_ISA::lora_call<T>(*bank, *groups, x, ldx, y, ldy, threads);                                          \
    }                                                                                                               \
    PG_EXPORT void PG_NAME(PG_ISA, attention, type)(const pg::Cache* cache, const pg::Step* step,                   \
                                                    const pg::Heads* queries, int64_t heads, int64_t window,        \
                                                    T* out, int64_t threads) {                                      \
        pg::PG_ISA::attention_call<T>(*cache, *step, *queries, heads, window, out, threads);                        \
    }                                                                                                               \
    PG_EXPORT void PG_NAME(PG_ISA, store_kv, type)(const pg::Cache* cache, const pg::Heads* keys,                   \
                                                   const pg::Heads* values, const int64_t* slots, int64_t rows) {   \
        pg::PG_ISA::store_kv_call<T>(*cache, *keys, *values, slots, rows);                                          \
    }                                                                                                               \
    PG_EXPORT void PG_NAME(PG_ISA, rms_norm, type)(const pg::Heads* x, const T* weight, int64_t rows,               \
                                                   int64_t heads, int64_t width, double eps, T* out,                \
                                                   int64_t threads) {                                               \
        pg::PG_ISA::rms_norm_call<T>(*x, weight, rows, heads, width, eps, out, threads);                            \
    }                                                                                                               \
    PG_EXPORT void PG_NAME(PG_ISA, rope, type)(const pg::Heads* q, int64_t heads, const pg::Heads* k,               \
                                               int64_t kv_heads, const int64_t* positions, int64_t rows,            \
                                               const float* table, int64_t dim) {                                   \
        pg::PG_ISA::rope_call<T>(*q, heads, *k, kv_heads, positions, rows, table, dim);                             \
    }                                                                                                               \
    PG_EXPORT void PG_NAME(PG_ISA, silu_mul, type)(const T* gate_up, int64_t ld, int64_t rows, int64_t width,       \
                                                   T* out, int64_t threads) {                                       \
        pg::PG_ISA::silu_mul_call<T>(gate_up, ld, rows, width, out, threads);                                       \
    }                                                                                                               \
    PG_EXPORT void PG_NAME(PG_ISA, decoder, type)(const pg::Layer* const* layers, const pg::Cache* const* caches,   \
                                                  int64_t count, const pg::Step* step, const float* rope, T* x,     \
                                                  int64_t threads) {                                                \
        pg::PG_ISA::decoder_call<T>(layers, caches, count, *step, rope, x, threads);                                \
    }

PG_EXPORT_TYPE(float, float32)
PG_EXPORT_TYPE(bf16, bfloat16)

PG_EXPORT void PG_NAME(PG_ISA, sample, float32)(const pg::SampleRows* how, const float* logits, int64_t rows,
                                                int64_t vocab, int64_t* tokens, int64_t threads) {
    pg::PG_ISA::sample_call(*how, logits, rows, vocab, tokens, threads);
}
PG_EXPORT int64_t PG_NAME(PG_ISA, vector, lanes)() { return pg::PG_ISA::VL; }
PG_EXPORT double PG_NAME(PG_ISA, fma, peak)(int64_t rounds, int64_t threads) {
    return pg::PG_ISA::fma_peak(rounds, threads);
}
PG_EXPORT double PG_NAME(PG_ISA, memory, read)(const float* data, int64_t count, int64_t threads) {
    return pg::PG_ISA::read_all(data, count, threads);
}
