"""What the reference backend keeps between calls: weights, adapter slots, keys and values, all as plain tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polygraft_kernels.api import KVCache, LoraBank, LoraPair, PackedLinear
from polygraft_kernels.checks import check_pairs, require


@dataclass(frozen=True, slots=True)
class ReferenceLinear(PackedLinear):
    """The weight [N, K] as it came; with `scale` float32 [N] it is int8, and the scale multiplies the sums."""

    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "out_features", self.weight.shape[0])
        object.__setattr__(self, "in_features", self.weight.shape[1])


class ReferenceBank(LoraBank):
    """A list of pairs per slot."""

    def __init__(
        self, in_features: int, segments: Sequence[int], num_slots: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.in_features = in_features
        self.segments = tuple(segments)
        self.num_slots = num_slots
        self._device = device
        self._dtype = dtype
        self._slots: list[tuple[LoraPair | None, ...]] = [self._empty()] * num_slots

    def pairs(self, slot: int) -> tuple[LoraPair | None, ...]:
        """What `slot` holds, one entry per segment."""
        return self._slots[slot]

    def load(self, slot: int, pairs: Sequence[LoraPair | None]) -> None:
        check_pairs(self, slot, pairs)
        self._slots[slot] = tuple(None if pair is None else self._copy(pair) for pair in pairs)

    def clear(self, slot: int) -> None:
        require(0 <= slot < self.num_slots, f"slot {slot} is not one of {self.num_slots}")
        self._slots[slot] = self._empty()

    def check(self) -> None:
        assert len(self._slots) == self.num_slots
        for slot, pairs in enumerate(self._slots):
            check_pairs(self, slot, pairs)

    def _empty(self) -> tuple[None, ...]:
        return (None,) * len(self.segments)

    def _copy(self, pair: LoraPair) -> LoraPair:
        a = pair.a.detach().to(self._device, self._dtype, copy=True)
        return LoraPair(a, pair.b.detach().to(self._device, self._dtype, copy=True), pair.scale)


class ReferenceCache(KVCache):
    """keys and values, each [num_blocks, block_size, G, D]."""

    def __init__(
        self, num_blocks: int, block_size: int, kv_heads: int, head_dim: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        shape = (num_blocks, block_size, kv_heads, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    def read(self, block_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        ids = torch.tensor(list(block_ids), dtype=torch.int64, device=self.keys.device)
        return self.keys[ids].flatten(0, 1), self.values[ids].flatten(0, 1)
