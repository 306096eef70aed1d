"""Causal paged attention over prefill chunks and decode rows in one call.

out[t, h] = softmax_j(q[t, h] . k[j, h // SHARE] / sqrt(D)) v[j], position[t] - window < j <= position[t].

A tile is BLOCK_M pairs (row, query head) of one sequence and one K/V head: the query heads that share keys lie in one
tile and read them once. Keys are cut into spans of SPAN at fixed positions. A span's softmax starts afresh, and spans
are merged in ascending order, always by `_merge`: one program may do so for all spans (a tile among many of a long
chunk), or one per span with `merge_kernel` after them (a sequence of few rows, so that few long sequences keep all
processors busy). What a tile does not see changes no bit of it, so chunk, prefill and decode agree for one BLOCK_M.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from polygraft_kernels.api import StepTensors
from polygraft_kernels.triton.kv import TritonCache
from polygraft_kernels.triton.numerics import LOG2_E, product, product_of_sums, rounded

SPAN = 256
"""Keys whose softmax is computed in one go."""
LEAST_TILE = 16
LEAST_SEQUENCES = 64
"""Sequences whose starts a program looks through at least, so that few kernels are compiled."""
ROOM = 64 << 20
"""Bytes for spans of chunks of a few rows; decode rows have what they need."""


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


@dataclass(frozen=True, slots=True)
class Tiling:
    """Pairs of (row, query head) of a tile, keys of one iteration, and the padded head size: powers of two."""

    block_m: int
    block_n: int
    block_d: int

    @property
    def options(self) -> dict[str, int | bool]:
        """How `attend_kernel` is compiled. No fused multiply-add but the matrix units': how a compiler fuses must not
        tell one way of merging from the other.
        """
        warps = 4 if self.block_m * self.block_d <= 64 * 64 else 8
        return {"num_warps": warps, "num_stages": 2, "enable_fp_fusion": False}


def tiling(wide: bool, share: int, head_dim: int, itemsize: int) -> Tiling:
    """For `share` query heads to a K/V head. Float32, which the matrix units do not multiply exactly, has small tiles
    that registers can hold.
    """
    block_d = max(16, triton.next_power_of_2(head_dim))
    widest = 64 if block_d <= 128 else 32
    block_m = widest if wide and itemsize < 4 else LEAST_TILE
    block_n = max(16, min(64, 64 * 128 // block_d * 4 // itemsize**2))
    return Tiling(max(block_m, triton.next_power_of_2(share)), block_n, block_d)


def most_spans(longest: int, window: int | None, per_tile: int) -> int:
    """How many spans a tile can see when no context is longer than `longest`."""
    spans = triton.cdiv(longest, SPAN)
    return spans if window is None else min(spans, (window + per_tile - 2) // SPAN + 2)


def pairs_apart(share: int, spans: int, block_d: int) -> int:
    """Sequences of up to so many pairs have a program per span: decode rows always, and while there is room for the
    results of so many `spans`, chunks of a few rows. Which way spans are merged changes no bit.
    """
    fits = spans * LEAST_TILE * block_d * 4 <= ROOM
    return max(LEAST_TILE, share) if fits else share


def attention(q: Tensor, cache: TritonCache, step: StepTensors, window: int | None, wide: bool) -> Tensor:
    """q [T, H, D], unit stride over D -> [T, H, D] contiguous; `wide` tiles are for many rows of a sequence."""
    rows, heads, head_dim = q.shape
    out = torch.empty((rows, heads, head_dim), dtype=q.dtype, device=q.device)
    sequences, table_width = step.block_tables.shape
    if rows == 0:
        return out
    share = heads // cache.kv_heads
    tiles = tiling(wide, share, head_dim, q.element_size())
    per_tile = tiles.block_m // share
    parts = most_spans(table_width * cache.block_size, window, per_tile)
    shape = (sequences, cache.kv_heads, parts, pairs_apart(share, sequences * cache.kv_heads * parts, tiles.block_d))
    peaks, masses = torch.empty((2, *shape), dtype=torch.float32, device=q.device)
    sums = torch.empty((*shape, tiles.block_d), dtype=torch.float32, device=q.device)
    seen, windowed = (0, False) if window is None else (window, True)
    attend_kernel[(rows // per_tile + sequences, cache.kv_heads, parts)](
        out,
        peaks,
        masses,
        sums,
        q,
        cache.keys,
        cache.values,
        step.query_starts,
        step.context_lens,
        step.block_tables,
        sequences,
        q.stride(0),
        q.stride(1),
        step.block_tables.stride(0),
        shape[-1],
        seen,
        head_dim**-0.5 * LOG2_E.value,
        cache.kv_heads,
        share,
        head_dim,
        cache.block_size,
        tiles.block_m,
        tiles.block_n,
        tiles.block_d,
        max(LEAST_SEQUENCES, triton.next_power_of_2(sequences)),
        SPAN,
        windowed,
        **tiles.options,
    )
    if parts > 1:
        merge_kernel[(sequences, cache.kv_heads)](
            out,
            peaks,
            masses,
            sums,
            step.query_starts,
            step.context_lens,
            parts,
            shape[-1],
            seen,
            cache.kv_heads,
            share,
            head_dim,
            tiles.block_m,
            tiles.block_d,
            SPAN,
            windowed,
            **tiles.options,
        )
    return out
