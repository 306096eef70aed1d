// The threads that run one call together. Each goes through the same phases; work within a phase is dealt out in
// shrinking portions, and a phase is over when its work is done, not when every thread has arrived. So a thread that
// lost its core to a neighbour holds nobody up: the others do its share, and it skips what is done when it comes back.
#pragma once

#include <omp.h>
#include <sched.h>

#include "vec.h"

namespace pg {
namespace PG_ISA {

constexpr int MaxPhases = 32;  // a decoder layer has 18
constexpr int SpinsBeforeYield = 10000;  // some tenths of a millisecond: longer, and a neighbour has the core

struct alignas(64) Phase {
    long taken = 0;
    long done = 0;
};

struct Team {
    int id;
    int size;
    Phase* phases;  // [MaxPhases], shared
    int next = 0;
    int awaited = 0;
    long totals[MaxPhases] = {};

    // Calls work(begin, end) until 0 .. total is covered by the whole team; portions are multiples of `grain`.
    template <class F>
    void share(long total, long grain, F work) {
        if (size == 1) {
            if (total > 0) work(0L, total);
            return;
        }
        Phase& phase = phases[next];
        totals[next++] = total;
        long begin = __atomic_load_n(&phase.taken, __ATOMIC_RELAXED);
        while (begin < total) {
            long portion = (total - begin) / (2 * size * grain) * grain;
            if (portion < grain) portion = grain;
            long end = begin + portion < total ? begin + portion : total;
            if (__atomic_compare_exchange_n(&phase.taken, &begin, end, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
                work(begin, end);
                __atomic_fetch_add(&phase.done, end - begin, __ATOMIC_RELEASE);
                begin = __atomic_load_n(&phase.taken, __ATOMIC_RELAXED);
            }
        }
    }

    // The same for a ragged list: owner o has count(o) pieces; calls work(o, piece) once for each.
    template <class Count, class F>
    void share_ragged(long owners, Count count, F work) {
        Phase& phase = phases[next];
        long first = 0, finished = 0;
        long mine = __atomic_fetch_add(&phase.taken, 1, __ATOMIC_RELAXED);
        for (long owner = 0; owner < owners; ++owner) {
            long pieces = count(owner);
            while (mine < first + pieces) {
                work(owner, mine - first);
                ++finished;
                mine = __atomic_fetch_add(&phase.taken, 1, __ATOMIC_RELAXED);
            }
            first += pieces;
        }
        __atomic_fetch_add(&phase.done, finished, __ATOMIC_RELEASE);
        totals[next++] = first;
    }

    // Calls work(row) once for each row.
    template <class F>
    void share_rows(long rows, F work) {
        share(rows, 1, [&](long begin, long end) {
            for (long row = begin; row < end; ++row) work(row);
        });
    }

    // Returns once all work shared so far is done. What waits lets others run: one of them may be who it waits for.
    void wait() {
        for (; awaited < next; ++awaited) {
            int spins = 0;
            while (__atomic_load_n(&phases[awaited].done, __ATOMIC_ACQUIRE) < totals[awaited]) {
#if defined(__x86_64__)
                _mm_pause();
#endif
                if (++spins > SpinsBeforeYield) sched_yield();
            }
        }
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
    Phase phases[MaxPhases];
    if (threads <= 1 || effort < 250e3) {
        Team team{0, 1, phases};
        execute(team, body);
        return;
    }
#pragma omp parallel num_threads(threads)
    {
        Team team{omp_get_thread_num(), omp_get_num_threads(), phases};
        execute(team, body);
    }
}

}  // namespace PG_ISA
}  // namespace pg
