"""What the reference backend keeps between calls: weights, adapter slots, keys and values, all as plain tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polygraft_kernels.api import Affine, KVCache, LoraBank, LoraPair, PackedLinear, PackedLora
from polygraft_kernels.checks import check_affines, check_pairs, check_slot


@dataclass(frozen=True, slots=True)
class ReferenceLinear(PackedLinear):
    """The weight [N, K] as it came; with `scale` float32 [N] it is int8, and the scale multiplies the sums."""

    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "out_features", self.weight.shape[0])
        object.__setattr__(self, "in_features", self.weight.shape[1])


@dataclass(frozen=True, slots=True)
class Held:
    """What a slot holds for one segment; an affine's vectors are float32."""

    pair: LoraPair | None
    affine: Affine


@dataclass(frozen=True, slots=True)
class ReferenceLora(PackedLora):
    """One entry per segment."""

    held: tuple[Held, ...]

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Memory that the tensors take."""
        pairs = [each.pair for each in self.held if each.pair is not None]
        vectors = [vector for each in self.held for vector in (each.affine.gain, each.affine.shift)]
        tensors = [tensor for pair in pairs for tensor in (pair.a, pair.b)]
        return sum(tensor.nbytes for tensor in (*tensors, *vectors) if tensor is not None)


NOTHING = Held(None, Affine())


class ReferenceBank(LoraBank):
    """Per slot, what each segment has of it."""

    def __init__(
        self, in_features: int, segments: Sequence[int], num_slots: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.in_features = in_features
        self.segments = tuple(segments)
        self.num_slots = num_slots
        self._device = device
        self._dtype = dtype
        self._slots: list[tuple[Held, ...]] = [self._empty()] * num_slots

    def held(self, slot: int) -> tuple[Held, ...]:
        """What `slot` holds, one entry per segment."""
        return self._slots[slot]

    def pack(self, pairs: Sequence[LoraPair | None], affines: Sequence[Affine | None] | None = None) -> ReferenceLora:
        check_pairs(self, pairs)
        check_affines(self, affines)
        affines = [None] * len(pairs) if affines is None else affines
        return ReferenceLora(tuple(self._copy(pair, affine) for pair, affine in zip(pairs, affines, strict=True)))

    def place(self, slot: int, packed: PackedLora) -> None:
        assert isinstance(packed, ReferenceLora)
        check_slot(self, slot)
        self._slots[slot] = packed.held

    def clear(self, slot: int) -> None:
        check_slot(self, slot)
        self._slots[slot] = self._empty()

    def check(self) -> None:
        assert len(self._slots) == self.num_slots
        for held in self._slots:
            check_pairs(self, [each.pair for each in held])
            check_affines(self, [each.affine for each in held])

    def _empty(self) -> tuple[Held, ...]:
        return (NOTHING,) * len(self.segments)

    def _copy(self, pair: LoraPair | None, affine: Affine | None) -> Held:
        if pair is not None:
            a, b = (each.detach().to(self._device, self._dtype, copy=True) for each in (pair.a, pair.b))
            pair = LoraPair(a, b, pair.scale)
        affine = Affine() if affine is None else affine
        return Held(pair, Affine(self._vector(affine.gain), self._vector(affine.shift)))

    def _vector(self, vector: Tensor | None) -> Tensor | None:
        return None if vector is None else vector.detach().to(self._device, torch.float32, copy=True)


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
