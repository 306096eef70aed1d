"""The kernels of attention.py: a tile's spans of keys, each with a softmax of its own, and their merging."""

from __future__ import annotations

import triton
import triton.language as tl

from polygraft_kernels.triton.numerics import product, product_of_sums, rounded


@triton.jit
def _merge(peak, mass, acc, other_peak, other_mass, other_acc):
    """Two softmax sums, each relative to its own peak (in powers of two), as one. Merging nothing (-inf, 0, 0) is
    exact.
    """
    both = tl.maximum(peak, other_peak)
    safe = tl.where(both == float("-inf"), 0.0, both)
    mine, others = tl.exp2(peak - safe), tl.exp2(other_peak - safe)
    return both, mass * mine + other_mass * others, acc * mine[:, None] + other_acc * others[:, None]


@triton.jit
def _sequence_of(query_starts, sequences, tile, PER_TILE: tl.constexpr, BLOCK_S: tl.constexpr):
    """The sequence whose tiles include `tile`: sequence s has the tiles from query_starts[s] // PER_TILE + s on."""
    ids = tl.arange(0, BLOCK_S)
    starts = tl.load(query_starts + ids, mask=ids < sequences, other=0)
    return tl.sum(((starts // PER_TILE + ids <= tile) & (ids < sequences)).to(tl.int32), 0) - 1


@triton.jit
def _spans(first_row, end, context, window, PER_TILE: tl.constexpr, SPAN: tl.constexpr, WINDOWED: tl.constexpr):
    """(oldest key any row of the tile sees, newest, first span, number of spans)."""
    newest = context - end + min(first_row + PER_TILE, end) - 1
    oldest = 0
    if WINDOWED:
        oldest = max(context - end + first_row - window + 1, 0)
    first = oldest // SPAN
    return oldest, newest, first, newest // SPAN - first + 1


@triton.jit
def _attend_span(
    q,
    position,
    keys,
    values,
    blocks,
    kv_head,
    begin,
    end,
    window,
    scale,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """(peak [M], mass [M], sum of weighted values [M, BLOCK_D]) over the keys begin .. end - 1."""
    peak = tl.full((q.shape[0],), float("-inf"), tl.float32)
    mass = tl.zeros((q.shape[0],), tl.float32)
    acc = tl.zeros((q.shape[0], BLOCK_D), tl.float32)
    column = tl.arange(0, BLOCK_D)
    for n0 in range(begin, end, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        stored = n < end
        block = tl.load(blocks + n // BLOCK_SIZE, mask=stored, other=0).to(tl.int64)
        at = ((block * KV_HEADS + kv_head) * BLOCK_SIZE + n % BLOCK_SIZE) * HEAD_DIM
        k = tl.load(
            keys + at[None, :] + column[:, None], mask=stored[None, :] & (column < HEAD_DIM)[:, None], other=0.0
        )
        scores = product(q, k, tl.zeros((q.shape[0], BLOCK_N), tl.float32)) * scale
        seen = stored[None, :] & (n[None, :] <= position[:, None])
        if WINDOWED:
            seen = seen & (position[:, None] - n[None, :] < window)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(peak - safe)
        mass = mass * shrink + tl.sum(weights, 1)
        v = tl.load(
            values + at[:, None] + column[None, :], mask=stored[:, None] & (column < HEAD_DIM)[None, :], other=0.0
        )
        acc = product_of_sums(weights, v, acc * shrink[:, None])
        peak = higher
    return peak, mass, acc


@triton.jit
def _store_rows(out, acc, mass, row, head, valid, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    column = tl.arange(0, BLOCK_D)
    mean = acc / tl.where(mass == 0.0, 1.0, mass)[:, None]
    at = (row.to(tl.int64) * HEADS + head)[:, None] * HEAD_DIM + column[None, :]
    tl.store(out + at, rounded(mean, out.dtype.element_ty), mask=valid[:, None] & (column < HEAD_DIM)[None, :])


@triton.jit(do_not_specialize=["sequences", "table_stride", "pairs", "window"])
def attend_kernel(
    out,
    peaks,
    masses,
    sums,
    q,
    keys,
    values,
    query_starts,
    context_lens,
    block_tables,
    sequences,
    q_row_stride,
    q_head_stride,
    table_stride,
    pairs,
    window,
    scale,
    KV_HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    SPAN: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Program (tile, K/V head, part). A sequence of at most `pairs` pairs has a program per span, whose results go to
    peaks and masses [S, G, parts, pairs] and sums [S, G, parts, pairs, BLOCK_D] unless one span is all. Other tiles use
    part 0 only.
    """
    tile, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    PER_TILE: tl.constexpr = BLOCK_M // SHARE
    sequence = _sequence_of(query_starts, sequences, tile, PER_TILE, BLOCK_S)
    start, end = tl.load(query_starts + sequence), tl.load(query_starts + sequence + 1)
    first_row = start + (tile - start // PER_TILE - sequence) * PER_TILE
    if first_row >= end:
        return
    context = tl.load(context_lens + sequence)
    oldest, newest, first_span, spans = _spans(first_row, end, context, window, PER_TILE, SPAN, WINDOWED)
    alone = (end - start) * SHARE <= pairs
    if part >= tl.where(alone, spans, 1):
        return
    pair = tl.arange(0, BLOCK_M)
    row, head = first_row + pair // SHARE, kv_head * SHARE + pair % SHARE
    valid = (pair < PER_TILE * SHARE) & (row < end)
    position = tl.where(valid, context - end + row, -1)
    column = tl.arange(0, BLOCK_D)
    mine = tl.load(
        q + row.to(tl.int64)[:, None] * q_row_stride + head[:, None] * q_head_stride + column[None, :],
        mask=valid[:, None] & (column < HEAD_DIM)[None, :],
        other=0.0,
    )
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    mass = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    begin_span = first_span + part
    end_span = tl.where(alone, begin_span + 1, first_span + spans)
    for span in range(begin_span, end_span):
        span_peak, span_mass, span_acc = _attend_span(
            mine,
            position,
            keys,
            values,
            block_tables + sequence.to(tl.int64) * table_stride,
            kv_head,
            max(span * SPAN, oldest // BLOCK_N * BLOCK_N),
            min((span + 1) * SPAN, newest + 1),
            window,
            scale,
            KV_HEADS,
            HEAD_DIM,
            BLOCK_SIZE,
            BLOCK_N,
            BLOCK_D,
            WINDOWED,
        )
        peak, mass, acc = _merge(peak, mass, acc, span_peak, span_mass, span_acc)
    if alone & (spans > 1):
        at = ((sequence.to(tl.int64) * KV_HEADS + kv_head) * tl.num_programs(2) + part) * pairs + pair
        tl.store(peaks + at, peak, mask=valid)
        tl.store(masses + at, mass, mask=valid)
        tl.store(sums + at[:, None] * BLOCK_D + column[None, :], acc, mask=valid[:, None])
    else:
        _store_rows(out, acc, mass, row, head, valid, KV_HEADS * SHARE, HEAD_DIM, BLOCK_D)


@triton.jit(do_not_specialize=["parts", "pairs", "window"])
def merge_kernel(
    out,
    peaks,
    masses,
    sums,
    query_starts,
    context_lens,
    parts,
    pairs,
    window,
    KV_HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPAN: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Program (sequence, K/V head): the spans of a sequence of at most `pairs` pairs, merged in ascending order."""
    sequence, kv_head = tl.program_id(0), tl.program_id(1)
    PER_TILE: tl.constexpr = BLOCK_M // SHARE
    start, end = tl.load(query_starts + sequence), tl.load(query_starts + sequence + 1)
    if (end == start) | ((end - start) * SHARE > pairs):
        return
    _, _, _, spans = _spans(start, end, tl.load(context_lens + sequence), window, PER_TILE, SPAN, WINDOWED)
    if spans == 1:
        return
    pair = tl.arange(0, BLOCK_M)
    row, head = start + pair // SHARE, kv_head * SHARE + pair % SHARE
    valid = (pair < PER_TILE * SHARE) & (row < end)
    column = tl.arange(0, BLOCK_D)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    mass = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    first = (sequence.to(tl.int64) * KV_HEADS + kv_head) * parts * pairs
    for part in range(spans):
        at = first + part * pairs + pair
        part_peak = tl.load(peaks + at, mask=valid, other=float("-inf"))
        part_mass = tl.load(masses + at, mask=valid, other=0.0)
        part_acc = tl.load(sums + at[:, None] * BLOCK_D + column[None, :], mask=valid[:, None], other=0.0)
        peak, mass, acc = _merge(peak, mass, acc, part_peak, part_mass, part_acc)
    _store_rows(out, acc, mass, row, head, valid, KV_HEADS * SHARE, HEAD_DIM, BLOCK_D)
