// The machine's ceilings, for benchmarks: multiply-adds from registers and reading memory.
#pragma once

#include "team.h"

namespace pg {
namespace PG_ISA {

// 12 independent chains of `rounds` vector multiply-adds per thread; the sum is returned so that none can be left out.
inline double fma_peak(long rounds, long threads) {
    constexpr int Chains = 12;
    double sums[256] = {};
    run(threads, 1e9, 1, [&](Team& team) {
        Float<VL> chain[Chains], factor = splat<VL>(0.999f), term = splat<VL>(1e-3f);
        unroll<Chains>([&](auto c) PG_ALWAYS { chain[c] = splat<VL>(float(c)); });
        for (long i = 0; i < rounds; ++i)
            unroll<Chains>([&](auto c) PG_ALWAYS { chain[c] = fma<VL>(chain[c], factor, term); });
        double total = 0;
        unroll<Chains>([&](auto c) PG_ALWAYS { total += sum<VL>(chain[c]); });
        sums[team.id % 256] = total;
    });
    double total = 0;
    for (double sum : sums) total += sum;
    return total;
}

// Adds up `count` floats (a multiple of 64).
inline double read_all(const float* data, long count, long threads) {
    double sums[256] = {};
    run(threads, 1e9, 1, [&](Team& team) {
        Float<VL> parts[4] = {};
        team.share(count / 64, 1024, [&](long begin, long end) {
            for (const float* at = data + begin * 64; at < data + end * 64; at += 4 * VL)
                unroll<4>([&](auto p) PG_ALWAYS { parts[p] = parts[p] + load<VL>(at + p * VL); });
        });
        sums[team.id % 256] = sum<VL>(parts[0] + parts[1] + parts[2] + parts[3]);
    });
    double total = 0;
    for (double sum : sums) total += sum;
    return total;
}

}  // namespace PG_ISA
}  // namespace pg
