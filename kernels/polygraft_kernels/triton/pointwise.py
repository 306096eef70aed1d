"""Norm, rotary embedding, gated activation: one program per row, or per block of a row.

Letters as in `polygraft_kernels.api`. All arithmetic is float32; a result is rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from polygraft_kernels.triton.numerics import exp, rounded

ELEMENTS = 1024
"""Elements of a row that one program of `silu_mul_kernel` computes."""
HEADS = 16
"""Heads that one program of `rope_kernel` turns."""


@triton.jit
def rms_norm_kernel(out, x, weight, eps, inner, width, outer_stride, inner_stride, BLOCK: tl.constexpr):
    """out[i, j] = x[i, j] * rsqrt(mean(x[i, j]^2) + eps) * weight; program i * inner + j; x strided, out contiguous."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    source = x + (row // inner) * outer_stride + (row % inner) * inner_stride
    wide = tl.load(source + column, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(wide * wide, 0) / width + eps)
    scaled = wide * scale * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, rounded(scaled, out.dtype.element_ty), mask=inside)


@triton.jit
def add_rms_norm_kernel(total, normed, x, y, weight, eps, width, BLOCK: tl.constexpr):
    """total = x + y, rounded; normed = rms_norm(total). All [T, K] and contiguous; total may be x."""
    row = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    inside = column < width
    both = tl.load(x + row + column, mask=inside, other=0.0).to(tl.float32)
    both += tl.load(y + row + column, mask=inside, other=0.0).to(tl.float32)
    kept = rounded(both, total.dtype.element_ty)
    tl.store(total + row + column, kept, mask=inside)
    wide = kept.to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(wide * wide, 0) / width + eps)
    scaled = wide * scale * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + row + column, rounded(scaled, normed.dtype.element_ty), mask=inside)


@triton.jit
def _turn(x, heads, row_stride, head_stride, row, first, cos, sin, column, HALF: tl.constexpr, BLOCK_H: tl.constexpr):
    head = first + tl.arange(0, BLOCK_H)
    at = x + row * row_stride + head[:, None] * head_stride + column[None, :]
    inside = (head < heads)[:, None] & (column < HALF)[None, :]
    one = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    two = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, rounded(one * cos - two * sin, x.dtype.element_ty), mask=inside)
    tl.store(at + HALF, rounded(two * cos + one * sin, x.dtype.element_ty), mask=inside)


@triton.jit
def rope_kernel(
    q,
    k,
    positions,
    table,
    heads,
    kv_heads,
    q_row_stride,
    q_head_stride,
    k_row_stride,
    k_head_stride,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin) in place, halves paired; table [P, 2, HALF].

    Program (t, b): the b-th BLOCK_H heads of row t, those of q first.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    angles = table + tl.load(positions + row) * (2 * HALF)
    cos = tl.load(angles + column, mask=column < HALF, other=0.0)[None, :]
    sin = tl.load(angles + HALF + column, mask=column < HALF, other=0.0)[None, :]
    block = tl.program_id(1)
    q_blocks = tl.cdiv(heads, BLOCK_H)
    if block < q_blocks:
        _turn(q, heads, q_row_stride, q_head_stride, row, block * BLOCK_H, cos, sin, column, HALF, BLOCK_H)
    else:
        first = (block - q_blocks) * BLOCK_H
        _turn(k, kv_heads, k_row_stride, k_head_stride, row, first, cos, sin, column, HALF, BLOCK_H)


@triton.jit
def silu_mul_kernel(out, gate_up, width, row_stride, BLOCK: tl.constexpr):
    """out[t, i] = silu(gate_up[t, i]) * gate_up[t, I + i]; program (t, b): the b-th BLOCK of I."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + width + column, mask=inside, other=0.0).to(tl.float32)
    gated = gate / (1.0 + exp(-gate)) * up
    tl.store(out + row * width + column, rounded(gated, out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., K], at most three axes and unit stride over the last -> contiguous, same shape."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    width = x.shape[-1]
    outer, inner = (x.stride(0), 1) if x.dim() > 1 else (0, 1)
    inner_stride = 0
    if x.dim() == 3:
        inner, inner_stride = x.shape[1], x.stride(1)
    block = triton.next_power_of_2(width)
    rms_norm_kernel[(out.numel() // width,)](
        out, x, weight, eps, inner, width, outer, inner_stride, block, num_warps=warps_for(block)
    )
    return out


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + y, rms_norm(x + y)), both [T, K] and contiguous."""
    total, normed = torch.empty_like(x), torch.empty_like(x)
    rows, width = x.shape
    if rows > 0:
        block = triton.next_power_of_2(width)
        add_rms_norm_kernel[(rows,)](total, normed, x, y, weight, eps, width, block, num_warps=warps_for(block))
    return total, normed


def rope(q: Tensor, k: Tensor, positions: Tensor, table: Tensor) -> None:
    """In place; q [T, H, D], k [T, G, D] with unit stride over D."""
    rows, heads, head_dim = q.shape
    if rows == 0:
        return
    kv_heads, half = k.shape[1], head_dim // 2
    grid = (rows, triton.cdiv(heads, HEADS) + triton.cdiv(kv_heads, HEADS))
    rope_kernel[grid](
        q,
        k,
        positions,
        table,
        heads,
        kv_heads,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        half,
        triton.next_power_of_2(half),
        HEADS,
        num_warps=4,
    )


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 I] with unit stride over the columns -> [T, I]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel() > 0:
        grid = (rows, triton.cdiv(width, ELEMENTS))
        silu_mul_kernel[grid](out, gate_up, width, gate_up.stride(0), ELEMENTS, num_warps=4)
    return out


def warps_for(block: int) -> int:
    """Warps for a program that holds one row of `block` elements: about 16 elements a thread."""
    return min(max(block // 512, 1), 16)
