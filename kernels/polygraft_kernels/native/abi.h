// The structs that Python fills in and the kernels read; `layouts.py` mirrors them field by field.
// Void pointers point at numbers of the type the called function is for: float32 or bfloat16.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace pg {

// y = x W^T + bias; W packed in panels (tile.h; of 8 bits with a scale per output: int8.h), bias and scale in float32.
struct Linear {
    const void* weight;
    const float* bias;   // or null
    const float* scale;  // or null
    int64_t inputs;
    int64_t outputs;
};

// All of a slot's A matrices stacked, packed like a linear layer with `rank` outputs; rank 0: the slot is empty.
struct LoraSlot {
    const void* a;
    int64_t rank;
};

// One segment's B, packed like a linear layer with `rank` inputs, and what its outputs are scaled and moved by. Rank 0:
// no pair; with neither gain nor shift, the adapter leaves the segment alone.
struct LoraSegment {
    const void* b;
    int64_t rank;
    double scale;
    const float* gain;   // [width] or null
    const float* shift;  // [width] or null
};

struct LoraBank {
    const LoraSlot* slots;        // [num_slots]
    const LoraSegment* segments;  // [num_slots][num_segments]
    const int64_t* widths;        // [num_segments]
    int64_t num_segments;
    int64_t inputs;
};

struct LoraGroups {
    const int32_t* slots;   // [count]
    const int32_t* starts;  // [count + 1]
    int64_t count;
};

// Blocks of keys and values per head: [num_blocks][kv_heads][block], see kv.h for what is in a block.
struct Cache {
    void* keys;
    void* values;
    int64_t block_size;
    int64_t kv_heads;
    int64_t head_dim;
    int64_t lanes;
};

struct Step {
    const int64_t* positions;     // [rows]
    const int64_t* slot_mapping;  // [rows]
    const int32_t* query_starts;  // [sequences + 1]
    const int32_t* block_tables;  // [sequences][table_width]
    int64_t rows;
    int64_t sequences;
    int64_t table_width;
    LoraGroups groups;
};

// Rows of heads: element (t, h, d) lies at data[t * row + h * head + d].
struct Heads {
    void* data;
    int64_t row;
    int64_t head;
};

struct LoraLinear {
    const Linear* linear;
    const LoraBank* bank;  // or null
};

struct Layer {
    const void* input_norm;
    const void* q_norm;  // or null, and so is k_norm
    const void* k_norm;
    const void* post_norm;
    LoraLinear qkv, o, gate_up, down;
    int64_t heads;
    int64_t window;  // 0: none
    double eps;
};

// How each row of logits is sampled, all [rows]; what the numbers mean: api.py, SampleTensors.
struct SampleRows {
    const float* temperature;
    const int64_t* top_k;
    const float* top_p;
    const float* min_p;
    const float* uniform;
};

// Scratch memory of the calling thread, 64-byte aligned, valid until the next call. Aborts when memory is out.
extern "C" void* pg_workspace(size_t bytes);

// The same in zeroed memory of its own, for what the threads of one call tell each other.
extern "C" void* pg_zeroed_parts(size_t bytes);

}  // namespace pg
