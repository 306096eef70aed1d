// Causal attention over paged keys and values, read where they lie.
//
// Contexts of more than a split are cut at fixed positions, so that one sequence keeps all threads busy; the results of
// its splits are merged in order. A split that a query may not see at all changes nothing in it, bit for bit. What
// happens within a split: attention_tile.h.
#pragma once

#include "attention_tile.h"

namespace pg {
namespace PG_ISA {

// What the pieces of sequences of more than one split leave for the merge: a row of numbers per query vector.
struct Partials {
    float* memory = nullptr;
    long* first = nullptr;  // [sequences + 1], of each sequence's pieces

    static long width(const Attention& all) { return all.cache.head_dim + 1 + PG_LANES_PER_VECTOR; }

    static size_t bytes(const Attention& all) {
        long count = 0;
        for (long s = 0; s < all.step.sequences; ++s) count += all.splits(s) > 1 ? all.pieces(s) : 0;
        return count * MaxQueries * width(all) * sizeof(float) + (all.step.sequences + 1) * sizeof(long);
    }

    Partials() = default;

    Partials(const Attention& all, void* scratch) : first(static_cast<long*>(scratch)) {
        first[0] = 0;
        for (long s = 0; s < all.step.sequences; ++s) first[s + 1] = first[s] + (all.splits(s) > 1 ? all.pieces(s) : 0);
        memory = reinterpret_cast<float*>(first + all.step.sequences + 1);
    }

    float* of(const Attention& all, long sequence, long piece, long query) const {
        return memory + ((first[sequence] + piece) * MaxQueries + query) * width(all);
    }
};

// A query's share of what it has seen so far, for the merge: out [dim], highest, total [L].
template <int L>
struct Seen {
    float* out;
    float* highest;
    float* total;

    Seen(float* row, long dim) : out(row), highest(row + dim), total(row + dim + 1) {}

    // Nothing changes if `later` has seen nothing; `later` is what is left if this has not.
    void merge(const Seen& later, long dim) const {
        if (*later.highest == -INFINITY) return;
        float most = *highest > *later.highest ? *highest : *later.highest;
        Float<L> mine = *highest == -INFINITY ? Float<L>{} : exp<L>(splat<L>(*highest - most));
        Float<L> theirs = exp<L>(splat<L>(*later.highest - most));
        *highest = most;
        store<L>(total, load<L>(total) * mine + load<L>(later.total) * theirs);
        for (long d = 0; d < dim; d += L) store<L>(out + d, load<L>(out + d) * mine + load<L>(later.out + d) * theirs);
    }
};

// Shares two phases of work. finish(row, head, d, vector of L) gets every result once.
template <int L, class T, class Finish>
void attention(Team& team, const Attention& all, const Partials& partials, Finish finish) {
    const Step& step = all.step;
    long dim = all.cache.head_dim;
    auto give = [&](long sequence, const Attention::Piece& piece, long m, const float* out, Float<L> total) {
        float inverse = 1.0f / sum<L>(total);
        long query = piece.first + m, row = step.query_starts[sequence] + query / all.share();
        long head = piece.kv_head * all.share() + query % all.share();
        for (long d = 0; d < dim; d += L) finish(row, head, d, load<L>(out + d) * inverse);
    };
    team.share_ragged(step.sequences, [&](long s) { return all.pieces(s); }, [&](long sequence, long p) {
        Attention::Piece piece = all.piece(sequence, p);
        NextKeys next;
        long after = p + 1 < all.pieces(sequence) ? sequence : sequence + 1;
        if (after < step.sequences && all.rows(after) > 0) {
            Attention::Piece coming = all.piece(after, after == sequence ? p + 1 : 0);
            next = {coming.blocks, coming.kv_head, coming.begin, coming.end};
        }
        AttentionTile<L, T> tile(all, piece.blocks, piece.kv_head);
        bool whole = all.splits(sequence) == 1;
        tile.run(step.query_starts[sequence], piece, next, [&](long m) {
            if (whole) return give(sequence, piece, m, tile.out + m * dim, tile.total[m]);
            Seen<L> to(partials.of(all, sequence, p, m), dim);
            memcpy(to.out, tile.out + m * dim, dim * sizeof(float));
            *to.highest = tile.highest[m];
            store<L>(to.total, tile.total[m]);
        });
    });
    if (partials.first[step.sequences] == 0) return;
    team.wait();
    auto merged = [&](long s) { return all.splits(s) > 1 ? all.cache.kv_heads * all.tiles(s) : 0; };
    team.share_ragged(step.sequences, merged, [&](long sequence, long i) {
        long splits = all.splits(sequence);
        Attention::Piece piece = all.piece(sequence, i * splits);
        for (long m = 0; m < piece.count; ++m) {
            Seen<L> whole(partials.of(all, sequence, i * splits, m), dim);
            for (long split = 1; split < splits; ++split)
                whole.merge(Seen<L>(partials.of(all, sequence, i * splits + split, m), dim), dim);
            give(sequence, piece, m, whole.out, load<L>(whole.total));
        }
    });
}

// Wide vectors where they divide a block's sides, else those of 8, which always do.
template <class T, class Finish>
void attention(Team& team, const Attention& all, const Partials& partials, Finish finish) {
    if (all.cache.lanes == VL)
        attention<VL, T>(team, all, partials, finish);
    else if constexpr (VL > 8)
        attention<8, T>(team, all, partials, finish);
}

}  // namespace PG_ISA
}  // namespace pg
