// The threads that run one call together. Each goes through the same phases. The work of a phase is split evenly, each
// thread walks its own part in order, and who is done early helps the others. A phase is over when its work is done,
// not when every thread has arrived: a thread that lost its core to a neighbour holds nobody up, the others do its
// share, and it skips what is done when it comes back.
#pragma once

#include <omp.h>
#include <sched.h>

#include "abi.h"
#include "vec.h"

namespace pg {
namespace PG_ISA {

constexpr int SpinsBeforeYield = 10000;  // some tenths of a millisecond: longer, and a neighbour has the core

// One thread's part of one phase, alone on its cache line.
struct alignas(64) Part {
    long taken;  // pieces of this part that somebody has begun
    long done;   // pieces of any part that this thread has finished
};

struct Team {
    int id;
    int size;
    Part* parts;  // [phases][size], zero at first
    int next = 0;
    int awaited = 0;
    long totals[4] = {};

    // Calls work(begin, end) until 0 .. total is covered by the whole team, in pieces of `grain`.
    template <class F>
    void share(long total, long grain, F work) {
        long pieces = (total + grain - 1) / grain;
        Part* phase = begin_phase(pieces);
        long finished = 0;
        for (int i = 0; i < size; ++i) {
            int owner = (id + i) % size;
            long first = pieces * owner / size, count = pieces * (owner + 1) / size - first;
            while (__atomic_load_n(&phase[owner].taken, __ATOMIC_RELAXED) < count) {
                long mine = __atomic_fetch_add(&phase[owner].taken, 1, __ATOMIC_RELAXED);
                if (mine >= count) break;
                long begin = (first + mine) * grain, end = begin + grain < total ? begin + grain : total;
                work(begin, end);
                __atomic_store_n(&phase[id].done, ++finished, __ATOMIC_RELEASE);
            }
        }
    }

    // The same for a ragged list: owner o has count(o) pieces; calls work(o, piece) once for each.
    template <class Count, class F>
    void share_ragged(long owners, Count count, F work) {
        long pieces = 0;
        for (long owner = 0; owner < owners; ++owner) pieces += count(owner);
        long owner = 0, before = 0;  // of `owner`; pieces come in ascending order until this thread helps another
        share(pieces, 1, [&](long piece, long) {
            if (piece < before) owner = before = 0;
            for (long here; before + (here = count(owner)) <= piece; ++owner) before += here;
            work(owner, piece - before);
        });
    }

    // Calls work(row) once for each row.
    template <class F>
    void share_rows(long rows, F work) {
        share(rows, 1, [&](long row, long) { work(row); });
    }

    // Returns once all work shared so far is done. What waits lets others run: one of them may be who it waits for.
    void wait() {
        for (; awaited < next; ++awaited) {
            int spins = 0;
            while (finished(parts + long(awaited) * size) < totals[awaited % Unawaited]) {
#if defined(__x86_64__)
                _mm_pause();
#endif
                if (++spins > SpinsBeforeYield) sched_yield();
            }
        }
    }

private:
    static constexpr int Unawaited = 4;  // phases shared between two waits, at most

    Part* begin_phase(long pieces) {
        totals[next % Unawaited] = pieces;
        return parts + long(next++) * size;
    }

    long finished(const Part* phase) const {
        long sum = 0;
        for (int i = 0; i < size; ++i) sum += __atomic_load_n(&phase[i].done, __ATOMIC_ACQUIRE);
        return sum;
    }
};

// Keeps gcc from compiling every body twice, for one thread and for many.
template <class F>
__attribute__((noinline)) void execute(Team& team, const F& body) {
    body(team);
}

// Runs body(team), which has at most `phases` phases, on up to `threads` threads; on one when `effort` (multiply-adds,
// roughly) would not pay for waking them.
template <class F>
void run(long threads, double effort, long phases, F body) {
    if (threads < 1 || effort < 250e3) threads = 1;
    Part* parts = static_cast<Part*>(pg_zeroed_parts(phases * threads * sizeof(Part)));
    if (threads == 1) {
        Team team{0, 1, parts};
        execute(team, body);
        return;
    }
#pragma omp parallel num_threads(threads)
    {
        Team team{omp_get_thread_num(), omp_get_num_threads(), parts};
        execute(team, body);
    }
}

}  // namespace PG_ISA
}  // namespace pg
