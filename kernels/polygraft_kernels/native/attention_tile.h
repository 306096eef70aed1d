// What attention.h shares between threads: the pieces of a step's attention, and the tile that computes one.
//
// A tile is up to MaxQueries query vectors (rows x the query heads that share a key/value head) of one sequence. Keys
// pass in spans that start at fixed positions; each query carries its running maximum and sum (online softmax). A span
// that a query may not see at all changes nothing in it, bit for bit, so results do not depend on the tile.
#pragma once

#include <math.h>

#include "kv.h"
#include "linear.h"

namespace pg {
namespace PG_ISA {

constexpr int MaxQueries = 24;
constexpr int MaxHeadDim = 512;
constexpr int Span = 64;  // keys; a block size that does not divide it has spans of one block
constexpr int MaxSpan = 256;
constexpr int Split = 1024;  // keys, in whole spans

struct Attention {
    const Cache& cache;
    const Step& step;
    Heads queries;
    long heads;
    long window;  // 0: none

    long share() const { return heads / cache.kv_heads; }
    long span() const { return Span % cache.block_size == 0 ? Span : cache.block_size; }
    long rows(long sequence) const { return step.query_starts[sequence + 1] - step.query_starts[sequence]; }
    long queries_of(long sequence) const { return rows(sequence) * share(); }
    long tiles(long sequence) const { return (queries_of(sequence) + MaxQueries - 1) / MaxQueries; }
    long context(long sequence) const {
        return rows(sequence) == 0 ? 0 : step.positions[step.query_starts[sequence + 1] - 1] + 1;
    }
    long split() const { return Split / span() * span(); }
    long splits(long sequence) const { return (context(sequence) + split() - 1) / split(); }
    long pieces(long sequence) const { return cache.kv_heads * tiles(sequence) * splits(sequence); }

    // Piece p of a sequence: a head's tile and one split of its keys. The late rows see most keys, so they come first.
    struct Piece {
        const int32_t* blocks;
        long kv_head, tile, split;
        long first, count;  // query vectors of the sequence
        long begin, end;    // keys
    };

    Piece piece(long sequence, long p) const {
        long tiles = this->tiles(sequence), splits = this->splits(sequence), queries = queries_of(sequence);
        Piece it{step.block_tables + sequence * step.table_width, p / splits / tiles, p / splits % tiles, p % splits};
        long i = tiles - 1 - it.tile;
        it.first = queries * i / tiles;
        it.count = queries * (i + 1) / tiles - it.first;
        long row = step.query_starts[sequence];
        long lowest = step.positions[row + it.first / share()];
        it.begin = window > 0 && lowest >= window ? (lowest - window + 1) / span() * span() : 0;
        it.end = step.positions[row + (it.first + it.count - 1) / share()] + 1;
        if (it.begin < it.split * split()) it.begin = it.split * split();
        if (it.end > (it.split + 1) * split()) it.end = (it.split + 1) * split();
        return it;
    }
};

// Keys key .. end that come next, asked for while others are worked on.
struct NextKeys {
    const int32_t* blocks = nullptr;
    long kv_head = 0;
    long key = 0;
    long end = 0;
};

template <int L, class T>
struct AttentionTile {
    const Attention& all;
    const int32_t* blocks;
    long kv_head;
    long count;                 // query vectors
    long position[MaxQueries];  // of each one's row
    long dim, lds, ldq;
    alignas(64) float query[MaxQueries * MaxHeadDim];  // scaled by 1 / sqrt(D)
    alignas(64) float out[MaxQueries * MaxHeadDim];
    alignas(64) float score[MaxQueries * MaxSpan];
    float highest[MaxQueries];
    Float<L> total[MaxQueries];

    AttentionTile(const Attention& all, const int32_t* blocks, long kv_head)
        : all(all), blocks(blocks), kv_head(kv_head) {
        dim = all.cache.head_dim;
        ldq = dim;
        lds = all.span();
    }

    // Query vector m is row first / share, head first % share of the sequence's rows. finish(m) reads the result.
    template <class Finish>
    void run(long first_row, const Attention::Piece& piece, NextKeys next, Finish finish) {
        count = piece.count;
        float scale = 1.0f / sqrtf(float(dim));
        long share = all.share();
        for (long m = 0; m < count; ++m) {
            long row = first_row + (piece.first + m) / share, head = kv_head * share + (piece.first + m) % share;
            const T* from = static_cast<const T*>(all.queries.data) + row * all.queries.row + head * all.queries.head;
            for (long d = 0; d < dim; d += L) {
                store<L>(query + m * ldq + d, load<L>(from + d) * scale);
                store<L>(out + m * ldq + d, Float<L>{});
            }
            position[m] = all.step.positions[row];
            highest[m] = -INFINITY;
            total[m] = Float<L>{};
        }
        for (long key = piece.begin; key < piece.end; key += lds) {
            long keys = piece.end - key < lds ? piece.end - key : lds;
            score_keys(key, keys);
            for (long m = 0; m < count; ++m) weigh(m, key, keys);
            add_values(key, keys, key + lds < piece.end ? NextKeys{blocks, kv_head, key + lds, piece.end} : next);
        }
        for (long m = 0; m < count; ++m) finish(m);
    }

private:
    const T* block(void* base, long key) const {
        return block_of<T>(base, all.cache, blocks[key / all.cache.block_size], kv_head);
    }

    // Part i of `parts` of a block, in as many stretches as a product of `depth` has. Blocks lie anywhere: the
    // processor cannot guess the next one, but we know it.
    Ahead part_of(const T* block, long i, long parts, long depth) const {
        if (block == nullptr) return {};
        long lines = all.cache.block_size * dim * long(sizeof(T)) / 64, mine = (lines + parts - 1) / parts;
        long stretches = (depth + Stretch - 1) / Stretch;
        return {reinterpret_cast<const char*>(block) + 64 * mine * i, (mine + stretches - 1) / stretches};
    }

    // score[m][j] = query m . key j, for whole vectors of keys. Meanwhile the values of the same keys are fetched.
    void score_keys(long key, long keys) {
        for (long j = 0; j < keys;) {
            long in_block = (key + j) % all.cache.block_size;
            const T* panel = block(all.cache.keys, key + j) + in_block * dim;
            bool two = keys - j > L && (j + L) % all.cache.block_size != 0;
            Ahead ahead = in_block == 0 ? part_of(block(all.cache.values, key + j), 0, 1, dim) : Ahead{};
            over_rows([&](auto rows, long m) PG_ALWAYS {
                const float* from = query + m * ldq;
                float* to = score + m * lds + j;
                if (two)
                    product<L, rows, 2, 1>(from, ldq, panel, dim * L, dim, to, lds, true, m == 0 ? ahead : Ahead{});
                else
                    product<L, rows, 1, 1>(from, ldq, panel, dim * L, dim, to, lds, true, m == 0 ? ahead : Ahead{});
            });
            j += two ? 2 * L : L;
        }
    }

    // Turns query m's scores into weights e^(score - highest), those of unseen keys into 0, and rescales what it has.
    void weigh(long m, long key, long keys) {
        float* mine = score + m * lds;
        long from = all.window > 0 ? position[m] - all.window - key : -1;  // sees keys from < j <= to of this span
        long to = position[m] - key;
        if (to < 0 || from >= keys) {
            for (long j = 0; j < keys; j += L) store<L>(mine + j, Float<L>{});
            return;
        }
        Float<L> most = splat<L>(-INFINITY);
        for (long j = 0; j < keys; j += L) {
            Float<L> s = seen(j, from, to) ? load<L>(mine + j) : splat<L>(-INFINITY);
            store<L>(mine + j, s);
            most = max<L>(most, s);
        }
        float before = highest[m];
        float now = largest<L>(most);
        if (now < before) now = before;
        highest[m] = now;
        Float<L> sums = {};
        for (long j = 0; j < keys; j += L) {
            Float<L> weight = seen(j, from, to) ? exp<L>(load<L>(mine + j) - now) : Float<L>{};
            store<L>(mine + j, weight);
            sums = sums + weight;
        }
        if (before == now) {
            total[m] = total[m] + sums;
            return;
        }
        Float<L> shrink = before == -INFINITY ? Float<L>{} : exp<L>(splat<L>(before - now));
        total[m] = total[m] * shrink + sums;
        for (long d = 0; d < dim; d += L) store<L>(out + m * ldq + d, load<L>(out + m * ldq + d) * shrink);
    }

    PG_INLINE typename Lanes<L>::I seen(long j, long from, long to) {
        typename Lanes<L>::I lane;
        for (int i = 0; i < L; ++i) lane[i] = i;
        lane += int32_t(j);
        return (lane > int32_t(from)) & (lane <= int32_t(to));
    }

    // out[m] += sum over keys of weight * value, ascending. Meanwhile the keys that come next are fetched.
    void add_values(long key, long keys, NextKeys next) {
        long step = all.cache.block_size;
        for (long j = 0; j < keys; j += step) {
            long depth = keys - j < step ? keys - j : step;
            const T* panel = block(all.cache.values, key + j);
            const T* coming = nullptr;
            if (next.key + j < next.end)
                coming = block_of<T>(all.cache.keys, all.cache, next.blocks[(next.key + j) / step], next.kv_head);
            over_rows([&](auto rows, long m) PG_ALWAYS {
                for (long d = 0; d < dim;) {
                    bool two = d + L < dim;
                    const T* values = panel + d * step;
                    const float* from = score + m * lds + j;
                    float* to = out + m * ldq + d;
                    Ahead ahead = m == 0 ? part_of(coming, d / (2 * L), (dim + 2 * L - 1) / (2 * L), depth) : Ahead{};
                    if (two)
                        product<L, rows, 2, 1>(from, lds, values, step * L, depth, to, ldq, false, ahead);
                    else
                        product<L, rows, 1, 1>(from, lds, values, step * L, depth, to, ldq, false, ahead);
                    d += two ? 2 * L : L;
                }
            });
        }
    }

    // f(Index<rows>, m) over all queries, in groups of as many rows as the registers hold.
    template <class F>
    PG_INLINE void over_rows(F f) {
        constexpr int Most = L < VL ? 2 : MaxRows;  // shapes that need short vectors are rare: little code for them
        long groups = (count + Most - 1) / Most;
        for (long i = 0; i < groups; ++i) {
            long m = count * i / groups;
            with_count<Most>(count * (i + 1) / groups - m, [&](auto rows) PG_ALWAYS { f(rows, m); });
        }
    }
};

}  // namespace PG_ISA
}  // namespace pg
