"""Adapter slots on the device: one pair of matrices per slot and segment, and a table of where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from polygraft_kernels.api import Affine, LoraBank, LoraPair
from polygraft_kernels.checks import check_affines, check_pairs, require

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


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """What a slot holds for one segment, each where there is one: A [r, K], and B transposed, [r, N], of exact rank, so
    that each program reads whole rows of both; gain and shift float32 [N].
    """

    a: Tensor | None
    b: Tensor | None
    gain: Tensor | None
    shift: Tensor | None
    scale: float

    @property
    def rank(self) -> int:
        """0 without a pair."""
        return 0 if self.a is None else self.a.shape[0]

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """In the order of the table of pointers."""
        return self.a, self.b, self.gain, self.shift


NOTHING = Packed(None, None, None, None, 0.0)


class TritonBank(LoraBank):
    """The slots' matrices and vectors, each an allocation of its own, and tables that a kernel finds them by.

    pointers int64 [slots, segments, 4] to A, B, gain and shift, 0 for what is absent; ranks int32 [slots, segments]
    with 0 for no pair; scales float32 [slots, segments]: their addresses never change, so that captured graphs see
    every later load.
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
        self._slots: list[tuple[Packed, ...]] = [self._empty()] * num_slots
        shape = (num_slots, len(self.segments))
        self.pointers = torch.zeros((*shape, 4), dtype=torch.int64, device=device)
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
        """How many numbers all slots hold."""
        return sum(t.numel() for held in self._slots for each in held for t in each.tensors if t is not None)

    def load(self, slot: int, pairs: Sequence[LoraPair | None], affines: Sequence[Affine | None] | None = None) -> None:
        check_pairs(self, slot, pairs)
        check_affines(self, affines)
        affines = [None] * len(pairs) if affines is None else affines
        packed = tuple(self._pack(pair, affine) for pair, affine in zip(pairs, affines, strict=True))
        for each in packed:
            self._bound.reach(each.rank)
        self._write(slot, packed)

    def clear(self, slot: int) -> None:
        require(0 <= slot < self.num_slots, f"slot {slot} is not one of {self.num_slots}")
        if any(each is not NOTHING for each in self._slots[slot]):
            self._write(slot, self._empty())

    def check(self) -> None:
        for slot, held in enumerate(self._slots):
            pointers, ranks, scales = _entries(held)
            assert self.pointers[slot].tolist() == pointers
            assert self.ranks[slot].tolist() == ranks
            assert self.scales[slot].tolist() == torch.tensor(scales, dtype=torch.float32).tolist()
            assert max(ranks) <= self.rank_bound
            for each, width in zip(held, self.segments, strict=True):
                assert each.a is None or each.a.shape == (each.rank, self.in_features)
                assert each.b is None or each.b.shape == (each.rank, width)
                assert all(vector is None or vector.shape == (width,) for vector in (each.gain, each.shift))

    def _write(self, slot: int, held: tuple[Packed, ...]) -> None:
        pointers, ranks, scales = _entries(held)
        self.pointers[slot] = torch.tensor(pointers, dtype=torch.int64, device=self._device)
        self.ranks[slot] = torch.tensor(ranks, dtype=torch.int32, device=self._device)
        self.scales[slot] = torch.tensor(scales, dtype=torch.float32, device=self._device)
        # only now may the old matrices go: the tables name them no longer, and the allocator keeps the stream's order
        self._slots[slot] = held

    def _pack(self, pair: LoraPair | None, affine: Affine | None) -> Packed:
        if pair is None and affine is None:
            return NOTHING
        gain, shift = (None, None) if affine is None else (self._vector(affine.gain), self._vector(affine.shift))
        if pair is None:
            return Packed(None, None, gain, shift, 0.0)
        a = pair.a.detach().to(self._device, self.dtype, copy=True).contiguous()
        b = pair.b.detach().to(self._device, self.dtype).T.contiguous()
        return Packed(a, b.clone() if b.data_ptr() == pair.b.data_ptr() else b, gain, shift, pair.scale)

    def _vector(self, vector: Tensor | None) -> Tensor | None:
        return None if vector is None else vector.detach().to(self._device, torch.float32, copy=True).contiguous()

    def _empty(self) -> tuple[Packed, ...]:
        return (NOTHING,) * len(self.segments)

    def _column_blocks(self) -> list[tuple[int, int, int, int]]:
        blocks: list[tuple[int, int, int, int]] = []
        before = 0
        for segment, width in enumerate(self.segments):
            blocks += [(segment, first, width, before) for first in range(0, width, BLOCK_N)]
            before += width
        return blocks


def _entries(held: Sequence[Packed]) -> tuple[list[list[int]], list[int], list[float]]:
    """Pointers, ranks and scales of one slot."""
    return (
        [[0 if tensor is None else tensor.data_ptr() for tensor in each.tensors] for each in held],
        [each.rank for each in held],
        [each.scale for each in held],
    )
