"""y[t, seg] = gain_seg * (y[t, seg] + scale * B_seg (A_seg x[t])) + shift_seg for the rows of every tile and every
segment its slot holds.

Shrink: v[s, t, seg, :r] = A_seg[:, split s of K] x[t, split s], float32; K is split at fixed lengths so that few rows
still keep many processors busy. Expand: y[t, n] = gain[n] * (y[t, n] + scale * sum_r (sum_s v[s, t, seg, r]) B_seg[n,
r]) + shift[n], the splits in order. Both read an adapter's exact rank from the bank; programs of modules that a slot
leaves alone and of tiles of no slot stop at once.

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
    a = tl.multiple_of(tl.load(pointers + 4 * entry).to(tl.pointer_type(x.dtype.element_ty)), 16)
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
def _vector(address, n, width, absent: tl.constexpr):
    """Elements n of the float32 vector at `address`; if that is 0, `absent`."""
    vector = tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16)
    return tl.load(vector + n, mask=(n < width) & (address != 0), other=absent)


@triton.jit
def _finish(y, y_stride, n, count, width, delta, gain, shift):
    """y[row, n] = gain[n] * (y[row, n] + delta) + shift[n] in float32, rounded once; gain and shift are addresses."""
    row = tl.arange(0, delta.shape[0])
    mask = (row < count)[:, None] & (n < width)[None, :]
    at = y + row[:, None] * y_stride + n[None, :]
    total = tl.load(at, mask=mask, other=0.0).to(tl.float32) + delta
    total *= _vector(gain, n, width, 1.0)[None, :]
    moved = total + _vector(shift, n, width, 0.0)[None, :]
    total = tl.where(shift != 0, moved, total)  # adding 0 would turn -0 into 0
    tl.store(at, rounded(total, y.dtype.element_ty), mask=mask)


@triton.jit
def _product_few(
    v, v_stride, b, n, count, rank, rows, width, SPLITS: tl.constexpr, BLOCK_R: tl.constexpr, FEW: tl.constexpr
):
    """sum_r (sum_s v[s, row, r]) B[n, r] of FEW rows."""
    row = tl.arange(0, FEW)
    sums = tl.zeros((FEW, n.shape[0]), tl.float32)
    for r0 in range(0, rank, BLOCK_R):
        r = r0 + tl.arange(0, BLOCK_R)
        part = _shrunk(v, row, r, count, rank, rows, v_stride, SPLITS)
        mask = (r < rank)[:, None] & (n < width)[None, :]
        weight = tl.load(b + r[:, None] * width + n[None, :], mask=mask, other=0.0).to(tl.float32)
        sums += tl.sum(part[:, :, None] * weight[None, :, :], 1)
    return sums


@triton.jit
def _product_many(
    v, v_stride, b, n, count, rank, rows, width, SPLITS: tl.constexpr, BLOCK_R: tl.constexpr, TILE: tl.constexpr
):
    """The same of TILE rows, on the matrix units."""
    row = tl.arange(0, TILE)
    sums = tl.zeros((TILE, n.shape[0]), tl.float32)
    for r0 in range(0, rank, BLOCK_R):
        r = r0 + tl.arange(0, BLOCK_R)
        part = _shrunk(v, row, r, count, rank, rows, v_stride, SPLITS)
        mask = (r < rank)[:, None] & (n < width)[None, :]
        weight = tl.load(b + r[:, None] * width + n[None, :], mask=mask, other=0.0)
        sums = product_of_sums(part, weight, sums)
    return sums


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
    gain, shift = tl.load(pointers + 4 * entry + 2), tl.load(pointers + 4 * entry + 3)
    if (rank == 0) & ((gain | shift) == 0):
        return
    first, count = tl.load(tiles + 3 * tile + 1).to(tl.int64), tl.load(tiles + 3 * tile + 2)
    n = tl.load(blocks + 4 * block + 1) + tl.arange(0, BLOCK_N)
    width = tl.load(blocks + 4 * block + 2)
    if ALIGNED:
        width = tl.multiple_of(width, 16)
    b = tl.multiple_of(tl.load(pointers + 4 * entry + 1).to(tl.pointer_type(y.dtype.element_ty)), 16)
    scale = tl.load(scales + entry)
    y += first * y_stride + tl.load(blocks + 4 * block + 3)
    v += (first * SEGMENTS + segment) * bound
    v_stride = SEGMENTS * bound
    if FEW == 0:
        many = scale * _product_many(v, v_stride, b, n, count, rank, rows, width, SPLITS, BLOCK_R, TILE)
        _finish(y, y_stride, n, count, width, many, gain, shift)
    elif count <= FEW:
        few = scale * _product_few(v, v_stride, b, n, count, rank, rows, width, SPLITS, BLOCK_R, FEW)
        _finish(y, y_stride, n, count, width, few, gain, shift)
    else:
        many = scale * _product_many(v, v_stride, b, n, count, rank, rows, width, SPLITS, BLOCK_R, TILE)
        _finish(y, y_stride, n, count, width, many, gain, shift)


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
