"""Between the q/k/v projection and attention in one pass: norm of each head, rotary embedding, keys and values stored.

q[t, h] <- rope(norm(q[t, h])) in place; keys[slot(t), g] = rope(norm(k[t, g])); values[slot(t), g] = v[t, g].
qkv [T, (H + 2 G) D] with heads side by side: those of q, then k, then v. The norm, where there is one, is rounded to
the model's dtype before heads are turned, as the single operations do.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from polygraft_kernels.api import DecoderLayer, StepTensors
from polygraft_kernels.triton.kv import TritonCache
from polygraft_kernels.triton.numerics import rounded
from polygraft_kernels.triton.pointwise import HEADS


@triton.jit
def _turned(at, inside, norm, eps, cos, sin, column, HALF: tl.constexpr, NORMED: tl.constexpr):
    """Both halves of the heads at `at` [heads, HALF], normed and turned, float32."""
    one = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    two = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        mean = (tl.sum(one * one, 1) + tl.sum(two * two, 1)) / (2 * HALF)
        scale = (1.0 / tl.sqrt_rn(mean + eps))[:, None]
        first = tl.load(norm + column, mask=column < HALF, other=0.0).to(tl.float32)[None, :]
        second = tl.load(norm + HALF + column, mask=column < HALF, other=0.0).to(tl.float32)[None, :]
        one = rounded(one * scale * first, at.dtype.element_ty).to(tl.float32)
        two = rounded(two * scale * second, at.dtype.element_ty).to(tl.float32)
    return one * cos - two * sin, two * cos + one * sin


@triton.jit
def place_kernel(
    qkv,
    keys,
    values,
    positions,
    slot_mapping,
    table,
    q_norm,
    k_norm,
    eps,
    heads,
    row_stride,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NORMED: tl.constexpr,
):
    """Program (t, b): the b-th BLOCK_H heads of row t, those of q first; keys and values of a head together."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    angles = table + tl.load(positions + row) * (2 * HALF)
    cos = tl.load(angles + column, mask=column < HALF, other=0.0)[None, :]
    sin = tl.load(angles + HALF + column, mask=column < HALF, other=0.0)[None, :]
    qkv += row * row_stride
    q_blocks = tl.cdiv(heads, BLOCK_H)
    if block < q_blocks:
        head = block * BLOCK_H + tl.arange(0, BLOCK_H)
        inside = (head < heads)[:, None] & (column < HALF)[None, :]
        at = qkv + head[:, None] * (2 * HALF) + column[None, :]
        one, two = _turned(at, inside, q_norm, eps, cos, sin, column, HALF, NORMED)
        tl.store(at, rounded(one, qkv.dtype.element_ty), mask=inside)
        tl.store(at + HALF, rounded(two, qkv.dtype.element_ty), mask=inside)
    else:
        slot = tl.load(slot_mapping + row)
        head = (block - q_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
        inside = (head < KV_HEADS)[:, None] & (column < HALF)[None, :] & (slot >= 0)
        at = qkv + (heads + head)[:, None] * (2 * HALF) + column[None, :]
        one, two = _turned(at, inside, k_norm, eps, cos, sin, column, HALF, NORMED)
        place = (slot // BLOCK_SIZE * KV_HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE
        target = place[:, None] * (2 * HALF) + column[None, :]
        tl.store(keys + target, rounded(one, keys.dtype.element_ty), mask=inside)
        tl.store(keys + target + HALF, rounded(two, keys.dtype.element_ty), mask=inside)
        at += KV_HEADS * 2 * HALF
        tl.store(values + target, tl.load(at, mask=inside), mask=inside)
        tl.store(values + target + HALF, tl.load(at + HALF, mask=inside), mask=inside)


def place(qkv: Tensor, layer: DecoderLayer, cache: TritonCache, step: StepTensors, table: Tensor) -> None:
    """qkv [T, (H + 2 G) D] contiguous; afterwards its q part is ready for attention and its k part is stale."""
    rows = qkv.shape[0]
    if rows == 0:
        return
    half = layer.head_dim // 2
    normed = layer.q_norm is not None and layer.k_norm is not None
    grid = (rows, triton.cdiv(layer.heads, HEADS) + triton.cdiv(layer.kv_heads, HEADS))
    place_kernel[grid](
        qkv,
        cache.keys,
        cache.values,
        step.positions,
        step.slot_mapping,
        table,
        layer.q_norm if normed else qkv,
        layer.k_norm if normed else qkv,
        layer.eps,
        layer.heads,
        qkv.stride(0),
        layer.kv_heads,
        half,
        triton.next_power_of_2(half),
        HEADS,
        cache.block_size,
        normed,
        num_warps=4,
    )
