"""y[t, seg] += scale * B_seg (A_seg x[t]) for the rows of every tile and every segment its slot holds.

Shrink: v[s, t, seg, :r] = A_seg[:, split s of K] x[t, split s], float32; K is split at fixed lengths so that few rows
still keep many processors busy. Expand: y[t, n] += scale * sum_r (sum_s v[s, t, seg, r]) B_seg[n, r], the splits in
order. Both read an adapter's exact rank from the bank; programs of absent modules and of tiles of no slot stop at once.

A tile of few rows multiplies vectors (a GEMV for up to `few` rows, A and B read once), one of more uses the matrix
units. The two sum in different orders; `few` = 0 leaves only the second.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from polygraft_kernels.triton.bank import BLOCK_N, TritonBank
from polygraft_kernels.triton.numerics import product, product_of_sums, rounded
from polygraft_kernels.triton.tiles import ROWS

SPLIT_K = 1024
"""Input features of one program of the shrink kernel."""
BLOCK_K = 128
BLOCK_R = 16
GEMV_ROWS = 4
SHRINK_WARPS, EXPAND_WARPS = 4, 8


@triton.jit
def _store(v, v_stride, row, r, count, rank, sums):
    tl.store(v + row[:, None] * v_stride + r[None, :], sums, mask=(row < count)[:, None] & (r < rank)[None, :])


@triton.jit
def _shrink_few(
    v, v_stride, x, x_stride, a, r, rank, count, begin, end, width, BLOCK_K: tl.constexpr, FEW: tl.constexpr
):
    """FEW rows: products kept apart until the end of the split, then summed over k at once."""
    row = tl.arange(0, FEW)
    sums = tl.zeros((FEW, r.shape[0], BLOCK_K), tl.float32)
    for k0 in range(begin, end, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        mask = (row < count)[:, None] & (k < end)[None, :]
        part = tl.load(x + row[:, None] * x_stride + k[None, :], mask=mask, other=0.0).to(tl.float32)
        mask = (r < rank)[:, None] & (k < end)[None, :]
        weight = tl.load(a + r[:, None] * width + k[None, :], mask=mask, other=0.0).to(tl.float32)
        sums += part[:, None, :] * weight[None, :, :]
    _store(v, v_stride, row, r, count, rank, tl.sum(sums, 2))


@triton.jit
def _shrink_many(
    v, v_stride, x, x_stride, a, r, rank, count, begin, end, width, BLOCK_K: tl.constexpr, TILE: tl.constexpr
):
    """TILE rows on the matrix units, one chain over k."""
    row = tl.arange(0, TILE)
    sums = tl.zeros((TILE, r.shape[0]), tl.float32)
    for k0 in range(begin, end, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        mask = (row < count)[:, None] & (k < end)[None, :]
        part = tl.load(x + row[:, None] * x_stride + k[None, :], mask=mask, other=0.0)
        mask = (r < rank)[None, :] & (k < end)[:, None]
        weight = tl.load(a + r[None, :] * width + k[:, None], mask=mask, other=0.0)
        sums = product(part, weight, sums)
    _store(v, v_stride, row, r, count, rank, sums)


@triton.jit(do_not_specialize=["rows"])
def shrink_kernel(
    v,
    x,
    tiles,
    pointers,
    ranks,
    rows,
    width,
    x_stride,
    bound,
    SEGMENTS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    TILE: tl.constexpr,
    FEW: tl.constexpr,
):
    """Program (tile, segment, split); v float32 [splits, rows, SEGMENTS, bound], x [rows, width]."""
    tile, segment, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(tiles + 3 * tile)
    if slot < 0:
        return
    entry = slot * SEGMENTS + segment
    rank = tl.load(ranks + entry)
    if rank == 0:
        return
    first, count = tl.load(tiles + 3 * tile + 1).to(tl.int64), tl.load(tiles + 3 * tile + 2)
    a = tl.multiple_of(tl.load(pointers + 2 * entry).to(tl.pointer_type(x.dtype.element_ty)), 16)
    begin = split * SPLIT
    end = min(begin + SPLIT, width)
    x += first * x_stride
    v += ((split * rows + first) * SEGMENTS + segment) * bound
    v_stride = SEGMENTS * bound
    for r0 in range(0, rank, BLOCK_R):
        r = r0 + tl.arange(0, BLOCK_R)
        if FEW == 0:
            _shrink_many(v, v_stride, x, x_stride, a, r, rank, count, begin, end, width, BLOCK_K, TILE)
        elif count <= FEW:
            _shrink_few(v, v_stride, x, x_stride, a, r, rank, count, begin, end, width, BLOCK_K, FEW)
        else:
            _shrink_many(v, v_stride, x, x_stride, a, r, rank, count, begin, end, width, BLOCK_K, TILE)


@triton.jit
def _shrunk(v, row, r, count, rank, rows, v_stride, SPLITS: tl.constexpr):
    """sum_s v[s, row, r], the splits in order: [rows of the tile, BLOCK_R]."""
    mask = (row < count)[:, None] & (r < rank)[None, :]
    at = v + row[:, None] * v_stride + r[None, :]
    total = tl.load(at, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(at + split * rows * v_stride, mask=mask, other=0.0)
    return total


@triton.jit
def _add(y, y_stride, row, n, count, width, delta):
    """y[row, n] += delta in float32, rounded once."""
    mask = (row < count)[:, None] & (n < width)[None, :]
    at = y + row[:, None] * y_stride + n[None, :]
    before = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, rounded(before + delta, y.dtype.element_ty), mask=mask)


@triton.jit
def _expand_few(
    y,
    y_stride,
    v,
    v_stride,
    b,
    n,
    count,
    rank,
    rows,
    width,
    scale,
    SPLITS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    FEW: tl.constexpr,
):
    row = tl.arange(0, FEW)
    sums = tl.zeros((FEW, n.shape[0]), tl.float32)
    for r0 in range(0, rank, BLOCK_R):
        r = r0 + tl.arange(0, BLOCK_R)
        part = _shrunk(v, row, r, count, rank, rows, v_stride, SPLITS)
        mask = (r < rank)[:, None] & (n < width)[None, :]
        weight = tl.load(b + r[:, None] * width + n[None, :], mask=mask, other=0.0).to(tl.float32)
        sums += tl.sum(part[:, :, None] * weight[None, :, :], 1)
    _add(y, y_stride, row, n, count, width, scale * sums)


@triton.jit
def _expand_many(
    y,
    y_stride,
    v,
    v_stride,
    b,
    n,
    count,
    rank,
    rows,
    width,
    scale,
    SPLITS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.arange(0, TILE)
    sums = tl.zeros((TILE, n.shape[0]), tl.float32)
    for r0 in range(0, rank, BLOCK_R):
        r = r0 + tl.arange(0, BLOCK_R)
        part = _shrunk(v, row, r, count, rank, rows, v_stride, SPLITS)
        mask = (r < rank)[:, None] & (n < width)[None, :]
        weight = tl.load(b + r[:, None] * width + n[None, :], mask=mask, other=0.0)
        sums = product_of_sums(part, weight, sums)
    _add(y, y_stride, row, n, count, width, scale * sums)


@triton.jit(do_not_specialize=["rows"])
def expand_kernel(
    y,
    v,
    tiles,
    pointers,
    ranks,
    scales,
    blocks,
    rows,
    y_stride,
    bound,
    SEGMENTS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    TILE: tl.constexpr,
    FEW: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Program (tile, column block); y [rows, sum of segments], v as the shrink kernel leaves it."""
    tile, block = tl.program_id(0), tl.program_id(1)
    slot = tl.load(tiles + 3 * tile)
    if slot < 0:
        return
    segment = tl.load(blocks + 4 * block)
    entry = slot * SEGMENTS + segment
    rank = tl.load(ranks + entry)
    if rank == 0:
        return
    first, count = tl.load(tiles + 3 * tile + 1).to(tl.int64), tl.load(tiles + 3 * tile + 2)
    n = tl.load(blocks + 4 * block + 1) + tl.arange(0, BLOCK_N)
    width = tl.load(blocks + 4 * block + 2)
    if ALIGNED:
        width = tl.multiple_of(width, 16)
    b = tl.multiple_of(tl.load(pointers + 2 * entry + 1).to(tl.pointer_type(y.dtype.element_ty)), 16)
    scale = tl.load(scales + entry)
    y += first * y_stride + tl.load(blocks + 4 * block + 3)
    v += (first * SEGMENTS + segment) * bound
    v_stride = SEGMENTS * bound
    if FEW == 0:
        _expand_many(y, y_stride, v, v_stride, b, n, count, rank, rows, width, scale, SPLITS, BLOCK_R, TILE)
    elif count <= FEW:
        _expand_few(y, y_stride, v, v_stride, b, n, count, rank, rows, width, scale, SPLITS, BLOCK_R, FEW)
    else:
        _expand_many(y, y_stride, v, v_stride, b, n, count, rank, rows, width, scale, SPLITS, BLOCK_R, TILE)


def lora(y: Tensor, x: Tensor, bank: TritonBank, tiles: Tensor, few: int) -> None:
    """In place; x [T, K], y [T, N] with unit stride over columns, tiles int32 [n, 3] on their device."""
    rows, width = x.shape
    if tiles.shape[0] == 0 or rows == 0:
        return
    segments, bound, splits = len(bank.segments), bank.rank_bound, triton.cdiv(width, SPLIT_K)
    v = torch.empty((splits, rows, segments, bound), dtype=torch.float32, device=x.device)
    shrink_kernel[(tiles.shape[0], segments, splits)](
        v,
        x,
        tiles,
        bank.pointers,
        bank.ranks,
        rows,
        width,
        x.stride(0),
        bound,
        segments,
        SPLIT_K,
        BLOCK_K,
        BLOCK_R,
        ROWS,
        few,
        num_warps=SHRINK_WARPS,
    )
    expand_kernel[(tiles.shape[0], bank.blocks.shape[0])](
        y,
        v,
        tiles,
        bank.pointers,
        bank.ranks,
        bank.scales,
        bank.blocks,
        rows,
        y.stride(0),
        bound,
        segments,
        splits,
        BLOCK_N,
        BLOCK_R,
        ROWS,
        few,
        bank.aligned,
        num_warps=EXPAND_WARPS,
    )
