"""Adapter slots on the device: one pair of matrices per slot and segment, and a table of where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from polygraft_kernels.api import LoraBank, LoraPair
from polygraft_kernels.checks import check_pairs, require

BLOCK_N = 128
"""Output columns of one program of the expand kernel."""
LEAST_RANK = 16


class RankBound:
    """The largest rank that any bank of a backend has held, as a power of two: what room for A x must reach.

    It only grows. A captured graph is good for as long as it stays what it was.
    """

    def __init__(self) -> None:
        self.value = LEAST_RANK

    def reach(self, rank: int) -> None:
        """Grow to hold `rank`."""
        self.value = max(self.value, triton.next_power_of_2(rank))


@dataclass(frozen=True, slots=True)
class Packed:
    """A [r, K], and B transposed, [r, N]: each program reads whole rows of both. Exact rank."""

    a: Tensor
    b: Tensor
    scale: float


class TritonBank(LoraBank):
    """The slots' matrices, each an allocation of its own, and tables that a kernel finds them by.

    pointers int64 [slots, segments, 2], ranks int32 [slots, segments] with 0 for an absent module, scales float32
    [slots, segments]: their addresses never change, so that captured graphs see every later load.
    blocks int32 [column blocks, 4]: segment, first column in it, its width, first column in y.
    """

    def __init__(
        self,
        in_features: int,
        segments: Sequence[int],
        num_slots: int,
        device: torch.device,
        dtype: torch.dtype,
        bound: RankBound,
    ) -> None:
        self.in_features = in_features
        self.segments = tuple(segments)
        self.num_slots = num_slots
        self._device = device
        self.dtype = dtype
        self._bound = bound
        self._slots: list[tuple[Packed | None, ...]] = [self._empty()] * num_slots
        shape = (num_slots, len(self.segments))
        self.pointers = torch.zeros((*shape, 2), dtype=torch.int64, device=device)
        self.ranks = torch.zeros(shape, dtype=torch.int32, device=device)
        self.scales = torch.zeros(shape, dtype=torch.float32, device=device)
        self.blocks = torch.tensor(self._column_blocks(), dtype=torch.int32, device=device)

    @property
    def rank_bound(self) -> int:
        """No rank is larger; a power of two."""
        return self._bound.value

    @property
    def aligned(self) -> bool:
        """Whether every row of every B starts at a multiple of 16 elements."""
        return all(width % 16 == 0 for width in self.segments)

    @property
    def elements(self) -> int:
        """What all slots' matrices hold."""
        return sum(p.a.numel() + p.b.numel() for pairs in self._slots for p in pairs if p is not None)

    def load(self, slot: int, pairs: Sequence[LoraPair | None]) -> None:
        check_pairs(self, slot, pairs)
        packed = tuple(None if pair is None else self._pack(pair) for pair in pairs)
        for pair in packed:
            if pair is not None:
                self._bound.reach(pair.a.shape[0])
        self._write(slot, packed)

    def clear(self, slot: int) -> None:
        require(0 <= slot < self.num_slots, f"slot {slot} is not one of {self.num_slots}")
        if any(self._slots[slot]):
            self._write(slot, self._empty())

    def check(self) -> None:
        for slot, pairs in enumerate(self._slots):
            pointers, ranks, scales = _entries(pairs)
            assert self.pointers[slot].tolist() == pointers
            assert self.ranks[slot].tolist() == ranks
            assert self.scales[slot].tolist() == torch.tensor(scales, dtype=torch.float32).tolist()
            assert max(ranks) <= self.rank_bound
            for pair, width in zip(pairs, self.segments, strict=True):
                assert pair is None or (pair.a.shape[1], pair.b.shape[1]) == (self.in_features, width)

    def _write(self, slot: int, pairs: tuple[Packed | None, ...]) -> None:
        pointers, ranks, scales = _entries(pairs)
        self.pointers[slot] = torch.tensor(pointers, dtype=torch.int64, device=self._device)
        self.ranks[slot] = torch.tensor(ranks, dtype=torch.int32, device=self._device)
        self.scales[slot] = torch.tensor(scales, dtype=torch.float32, device=self._device)
        # only now may the old matrices go: the tables name them no longer, and the allocator keeps the stream's order
        self._slots[slot] = pairs

    def _pack(self, pair: LoraPair) -> Packed:
        a = pair.a.detach().to(self._device, self.dtype, copy=True).contiguous()
        b = pair.b.detach().to(self._device, self.dtype).T.contiguous()
        return Packed(a, b.clone() if b.data_ptr() == pair.b.data_ptr() else b, pair.scale)

    def _empty(self) -> tuple[None, ...]:
        return (None,) * len(self.segments)

    def _column_blocks(self) -> list[tuple[int, int, int, int]]:
        blocks: list[tuple[int, int, int, int]] = []
        before = 0
        for segment, width in enumerate(self.segments):
            blocks += [(segment, first, width, before) for first in range(0, width, BLOCK_N)]
            before += width
        return blocks


def _entries(pairs: Sequence[Packed | None]) -> tuple[list[list[int]], list[int], list[float]]:
    """Pointers, ranks and scales of one slot."""
    return (
        [[0, 0] if pair is None else [pair.a.data_ptr(), pair.b.data_ptr()] for pair in pairs],
        [0 if pair is None else pair.a.shape[0] for pair in pairs],
        [0.0 if pair is None else pair.scale for pair in pairs],
    )
