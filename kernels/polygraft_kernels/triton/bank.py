"""Adapter slots on the device: one pair of matrices per slot and segment, and a table of where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from polygraft_kernels.api import Affine, LoraBank, LoraPair, PackedLora
from polygraft_kernels.checks import check_affines, check_pairs, check_slot

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
class Part:
    """What an adapter adds to one segment, each where there is one: A [r, K], and B transposed, [r, N], of exact rank,
    so that each program reads whole rows of both; gain and shift float32 [N].
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

    def to(self, device: torch.device) -> Part:
        """The same on `device`; the copy may still be under way, in the order of the stream."""
        a, b, gain, shift = (None if t is None else t.to(device, non_blocking=True) for t in self.tensors)
        return Part(a, b, gain, shift, self.scale)


NOTHING = Part(None, None, None, None, 0.0)


@dataclass(frozen=True, slots=True)
class TritonLora(PackedLora):
    """One part per segment, in host memory, from which a device copies without help."""

    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Memory that the tensors take."""
        return sum(tensor.nbytes for part in self.parts for tensor in part.tensors if tensor is not None)


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
        self._slots: list[tuple[Part, ...]] = [self._empty()] * num_slots
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

    def pack(self, pairs: Sequence[LoraPair | None], affines: Sequence[Affine | None] | None = None) -> TritonLora:
        check_pairs(self, pairs)
        check_affines(self, affines)
        affines = [None] * len(pairs) if affines is None else affines
        return TritonLora(tuple(self._pack(pair, affine) for pair, affine in zip(pairs, affines, strict=True)))

    def place(self, slot: int, packed: PackedLora) -> None:
        assert isinstance(packed, TritonLora)
        check_slot(self, slot)
        for part in packed.parts:
            self._bound.reach(part.rank)
        self._write(slot, tuple(part if part is NOTHING else part.to(self._device) for part in packed.parts))

    def clear(self, slot: int) -> None:
        check_slot(self, slot)
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

    def _write(self, slot: int, held: tuple[Part, ...]) -> None:
        pointers, ranks, scales = _entries(held)
        self.pointers[slot] = torch.tensor(pointers, dtype=torch.int64, device=self._device)
        self.ranks[slot] = torch.tensor(ranks, dtype=torch.int32, device=self._device)
        self.scales[slot] = torch.tensor(scales, dtype=torch.float32, device=self._device)
        # only now may the old matrices go: the tables name them no longer, and the allocator keeps the stream's order
        self._slots[slot] = held

    def _pack(self, pair: LoraPair | None, affine: Affine | None) -> Part:
        if pair is None and affine is None:
            return NOTHING
        gain, shift = (None, None) if affine is None else (affine.gain, affine.shift)
        a, b = (None, None) if pair is None else (pair.a, pair.b.T)
        return Part(
            self._host(a, self.dtype),
            self._host(b, self.dtype),
            self._host(gain, torch.float32),
            self._host(shift, torch.float32),
            0.0 if pair is None else pair.scale,
        )

    def _host(self, tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        if tensor is None:
            return None
        kept = torch.empty(tensor.shape, dtype=dtype, pin_memory=self._device.type == "cuda")
        return kept.copy_(tensor.detach())

    def _empty(self) -> tuple[Part, ...]:
        return (NOTHING,) * len(self.segments)

    def _column_blocks(self) -> list[tuple[int, int, int, int]]:
        blocks: list[tuple[int, int, int, int]] = []
        before = 0
        for segment, width in enumerate(self.segments):
            blocks += [(segment, first, width, before) for first in range(0, width, BLOCK_N)]
            before += width
        return blocks


def _entries(held: Sequence[Part]) -> tuple[list[list[int]], list[int], list[float]]:
    """Pointers, ranks and scales of one slot."""
    return (
        [[0 if tensor is None else tensor.data_ptr() for tensor in each.tensors] for each in held],
        [each.rank for each in held],
        [each.scale for each in held],
    )
