// The threads that run one call together: each executes the same phases, a barrier between those that depend on
// each other. Within a phase, work is dealt out in shrinking portions, because a neighbour may slow one core down.
#pragma once

#include <omp.h>

#include "vec.h"

namespace pg {
namespace PG_ISA {

constexpr int MaxPhases = 64;

struct Team {
    int id;
    int size;
    long* taken;  // [MaxPhases], shared: how much of each phase's work has been dealt
    int phase = 0;

    void barrier() {
        if (size > 1) {
#pragma omp barrier
        }
    }

    // Calls work(begin, end) until 0 .. total is covered by the whole team; portions are multiples of `grain`.
    template <class F>
    void share(long total, long grain, F work) {
        long* next = &taken[phase++];
        if (size == 1) {
            if (total > 0) work(0L, total);
            return;
        }
        long begin = __atomic_load_n(next, __ATOMIC_RELAXED);
        while (begin < total) {
            long portion = (total - begin) / (2 * size * grain) * grain;
            if (portion < grain) portion = grain;
            long end = begin + portion < total ? begin + portion : total;
            if (__atomic_compare_exchange_n(next, &begin, end, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
                work(begin, end);
                begin = __atomic_load_n(next, __ATOMIC_RELAXED);
            }
        }
    }

    // The same over a ragged list: owner o has count(o) pieces; calls work(o, piece) for each of them once.
    template <class Count, class F>
    void share_ragged(long owners, Count count, F work) {
        long* next = &taken[phase++];
        long first = 0;
        long mine = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED);
        for (long owner = 0; owner < owners; ++owner) {
            long pieces = count(owner);
            while (mine < first + pieces) {
                work(owner, mine - first);
                mine = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED);
            }
            first += pieces;
        }
    }

    // work(row) for an even share of the rows.
    template <class F>
    void rows(long total, F work) {
        long begin = total * id / size, end = total * (id + 1) / size;
        for (long row = begin; row < end; ++row) work(row);
    }
};

// Keeps gcc from compiling every body twice, for one thread and for many.
template <class F>
__attribute__((noinline)) void execute(Team& team, const F& body) {
    body(team);
}

// Runs body(team) on up to `threads` threads; one when `effort` (multiply-adds, roughly) would not pay for waking them.
template <class F>
void run(long threads, double effort, F body) {
    long taken[MaxPhases] = {};
    if (threads <= 1 || effort < 250e3) {
        Team team{0, 1, taken};
        execute(team, body);
        return;
    }
#pragma omp parallel num_threads(threads)
    {
        Team team{omp_get_thread_num(), omp_get_num_threads(), taken};
        execute(team, body);
    }
}

}  // namespace PG_ISA
}  // namespace pg
