"""Paged keys and values. A block holds each head's tokens side by side: one head's keys are read in one piece."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from polygraft_kernels.api import KVCache


class TritonCache(KVCache):
    """keys and values, each [num_blocks, G, block_size, D]."""

    def __init__(
        self, num_blocks: int, block_size: int, kv_heads: int, head_dim: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        shape = (num_blocks, kv_heads, block_size, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    def read(self, block_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        ids = torch.tensor(list(block_ids), dtype=torch.int64, device=self.keys.device)
        keys, values = (each[ids].transpose(1, 2).flatten(0, 1) for each in (self.keys, self.values))
        return keys, values


@triton.jit
def store_kv_kernel(
    keys,
    values,
    k,
    v,
    slot_mapping,
    k_row_stride,
    k_head_stride,
    v_row_stride,
    v_head_stride,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """keys[b, g, o], values[b, g, o] = k[t, g], v[t, g] with slot_mapping[t] = b * BLOCK_SIZE + o; program t.

    A negative slot stores nothing: the row fills up a captured batch.
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + row)
    if slot < 0:
        return
    head, column = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_D)[None, :]
    inside = (head < KV_HEADS) & (column < HEAD_DIM)
    target = ((slot // BLOCK_SIZE * KV_HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_DIM + column
    tl.store(keys + target, tl.load(k + row * k_row_stride + head * k_head_stride + column, mask=inside), mask=inside)
    tl.store(values + target, tl.load(v + row * v_row_stride + head * v_head_stride + column, mask=inside), mask=inside)


def store_kv(k: Tensor, v: Tensor, cache: TritonCache, slot_mapping: Tensor) -> None:
    """k and v [T, G, D] with unit stride over D; slot_mapping int64 [T]."""
    rows, heads, head_dim = k.shape
    if rows == 0:
        return
    store_kv_kernel[(rows,)](
        cache.keys,
        cache.values,
        k,
        v,
        slot_mapping,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        heads,
        head_dim,
        cache.block_size,
        triton.next_power_of_2(heads),
        triton.next_power_of_2(head_dim),
        num_warps=4,
    )
