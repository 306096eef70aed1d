// Drawing a token from a row of logits without sorting the vocabulary: weights relative to the likeliest token, the
// lowest weight that stays found by a histogram of their bits, the cumulated sum taken by blocks.
#pragma once

#include <math.h>

#include <algorithm>
#include <functional>

#include "team.h"

namespace pg {
namespace PG_ISA {

constexpr float GreedyBelow = 1e-5f;
constexpr float LeastExponent = -87.0f;  // weights below e^-87 are zero
constexpr long SampleBlock = 256;        // tokens summed before the sums are cumulated
constexpr int BucketShift = 19;          // a bucket: weights with the same exponent and first 4 bits of mantissa
constexpr int Buckets = (0x3f800000 >> BucketShift) + 1;  // up to the weight 1

// What stays of a row: all weights above `edge`, and of those equal to it the first `at_edge`, which may be all.
struct Limit {
    float edge = 0.0f;
    long at_edge = 0;
    bool is_cut = false;  // there are more of them
};

inline long sample_blocks(long vocab) { return (vocab + SampleBlock - 1) / SampleBlock; }

// One thread's memory for the row at hand.
struct SampleRoom {
    double* sums;       // [blocks], of each block's weights
    double* masses;     // [Buckets]
    float* weights;     // [blocks][SampleBlock], zero behind the vocabulary
    float* candidates;  // as many
    int* counts;        // [Buckets]

    static long bytes(long vocab) {
        long blocks = sample_blocks(vocab);
        return (blocks + Buckets) * sizeof(double) + (2 * blocks * SampleBlock + Buckets) * sizeof(float);
    }
    SampleRoom(void* memory, long vocab) {
        long blocks = sample_blocks(vocab);
        sums = static_cast<double*>(memory);
        masses = sums + blocks;
        weights = reinterpret_cast<float*>(masses + Buckets);
        candidates = weights + blocks * SampleBlock;
        counts = reinterpret_cast<int*>(candidates + blocks * SampleBlock);
    }
};

inline int bucket_of(float weight) {
    uint32_t bits;
    memcpy(&bits, &weight, sizeof bits);
    return std::min<int>(bits >> BucketShift, Buckets - 1);
}

inline float largest_of(const float* x, long count) {
    Float<VL> most = splat<VL>(-INFINITY);
    long i = 0;
    for (; i + VL <= count; i += VL) most = max<VL>(load<VL>(x + i), most);
    float result = largest<VL>(most);
    for (; i < count; ++i) result = x[i] > result ? x[i] : result;
    return result;
}

// weights[i ...] = f(i) for every vector of the row; leaves the blocks' sums behind, and returns theirs.
template <class F>
PG_INLINE double set_weights(const SampleRoom& room, long vocab, F f) {
    double mass = 0;
    for (long b = 0; b < sample_blocks(vocab); ++b) {
        Float<VL> sums = {};
        for (long i = b * SampleBlock; i < (b + 1) * SampleBlock; i += VL) {
            Float<VL> weights = f(i);
            store<VL>(room.weights + i, weights);
            sums = sums + weights;
        }
        room.sums[b] = sum<VL>(sums);
        mass += room.sums[b];
    }
    return mass;
}

// Goes down from the largest of the weights above `floor` while keeps(rank, mass of the larger ones).
template <class Keeps>
Limit walk_down(const SampleRoom& room, long vocab, float floor, Keeps keeps) {
    long found = 0;
    for (long i = 0; i < vocab; i += VL) {  // the last vector goes on with zeros
        if (!any_above<VL>(load<VL>(room.weights + i), splat<VL>(floor))) continue;
        for (long lane = i; lane < i + VL; ++lane) {
            room.candidates[found] = room.weights[lane];
            found += room.weights[lane] > floor;
        }
    }
    std::fill(room.counts, room.counts + Buckets, 0);
    std::fill(room.masses, room.masses + Buckets, 0.0);
    for (long i = 0; i < found; ++i) {
        int bucket = bucket_of(room.candidates[i]);
        room.counts[bucket] += 1;
        room.masses[bucket] += room.candidates[i];
    }
    long rank = 0;
    double mass = 0;
    int bucket = Buckets - 1;
    while (bucket > 0 && keeps(rank + room.counts[bucket], mass + room.masses[bucket])) {
        rank += room.counts[bucket];
        mass += room.masses[bucket];
        --bucket;
    }
    float* end = std::partition(room.candidates, room.candidates + found,
                                [=](float weight) { return bucket_of(weight) == bucket; });
    std::sort(room.candidates, end, std::greater<float>());
    Limit limit;
    const float* weight = room.candidates;
    for (; weight < end && keeps(rank, mass); ++weight, ++rank) {
        limit.at_edge = *weight == limit.edge ? limit.at_edge + 1 : 1;
        limit.edge = *weight;
        mass += *weight;
    }
    limit.is_cut = weight < end && *weight == limit.edge;
    return limit;
}

inline double keep(const SampleRoom& room, long vocab, Limit limit) {
    if (limit.is_cut)
        for (long i = 0; i < vocab; ++i)
            if (room.weights[i] == limit.edge && --limit.at_edge < 0) room.weights[i] = 0.0f;
    return set_weights(room, vocab, [&](long i) PG_ALWAYS {
        Float<VL> weights = load<VL>(room.weights + i);
        return weights >= limit.edge ? weights : Float<VL>{};
    });
}

// The token at which the cumulated weight passes `target`; never one of weight zero. -1 if there is none at all.
inline long invert_cdf(const SampleRoom& room, long vocab, double target) {
    double before = 0;
    long block = 0, token = -1;
    while (block + 1 < sample_blocks(vocab) && !(before + room.sums[block] > target)) before += room.sums[block++];
    for (long i = block * SampleBlock; i < (block + 1) * SampleBlock; ++i) {
        if (!(room.weights[i] > 0.0f)) continue;
        token = i;  // rounding may leave the target just past its block's last token
        before += room.weights[i];
        if (before > target) break;
    }
    return token;
}

// One row's token; top_k 0, top_p 1 and min_p 0 are off.
inline long sample_row(const SampleRoom& room, const float* logits, long vocab, float temperature, long top_k,
                       float top_p, float min_p, float uniform) {
    float top = largest_of(logits, vocab);
    long likeliest = std::find(logits, logits + vocab, top) - logits;
    if (likeliest == vocab) likeliest = 0;  // nothing but NaN
    if (temperature < GreedyBelow) return likeliest;
    double mass = set_weights(room, vocab, [&](long i) PG_ALWAYS {
        if (i >= vocab) return Float<VL>{};
        Float<VL> x = (load<VL>(logits + i, vocab - i) - top) / temperature;
        Float<VL> weights = x < LeastExponent ? Float<VL>{} : exp<VL>(x);
        if (vocab - i < VL) {
            float lanes[VL] = {};
            store<VL>(lanes, weights, vocab - i);
            weights = load<VL>(lanes);
        }
        return weights;
    });
    if (0 < top_k && top_k < vocab)
        mass = keep(room, vocab, walk_down(room, vocab, 0.0f, [=](long rank, double) { return rank < top_k; }));
    if (top_p < 1.0f) {
        // All weights up to this floor together have at most 1 - top_p of the mass. A little lower, for rounding's sake.
        double target = top_p * mass, floor = 0.999 * (mass - target) / vocab;
        auto keeps = [=](long rank, double before) { return rank == 0 || before < target; };
        mass = keep(room, vocab, walk_down(room, vocab, floor, keeps));
    }
    if (min_p > 0.0f) mass = keep(room, vocab, Limit{min_p});
    long token = invert_cdf(room, vocab, uniform * mass);
    return token < 0 ? likeliest : token;
}

inline void sample_call(const SampleRows& how, const float* logits, long rows, long vocab, int64_t* tokens,
                        long threads) {
    long room = (SampleRoom::bytes(vocab) + 63) / 64 * 64;
    char* memory = static_cast<char*>(pg_workspace(room * (threads < 1 ? 1 : threads)));
    run(threads, 10.0 * rows * vocab, 1, [&](Team& team) {
        SampleRoom mine(memory + team.id * room, vocab);
        team.share_rows(rows, [&](long row) {
            tokens[row] = sample_row(mine, logits + row * vocab, vocab, how.temperature[row], how.top_k[row],
                                     how.top_p[row], how.min_p[row], how.uniform[row]);
        });
    });
}

}  // namespace PG_ISA
}  // namespace pg
