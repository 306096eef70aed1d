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
from torch import Tensor

from polygraft_kernels.api import StepTensors
from polygraft_kernels.triton.attention_kernels import attend_kernel, merge_kernel
from polygraft_kernels.triton.kv import TritonCache
from polygraft_kernels.triton.numerics import LOG2_E

SPAN = 256
"""Keys whose softmax is computed in one go."""
LEAST_TILE = 16
LEAST_SEQUENCES = 64
"""Sequences whose starts a program looks through at least, so that few kernels are compiled."""
ROOM = 64 << 20
"""Bytes for spans of chunks of a few rows; decode rows have what they need."""


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
