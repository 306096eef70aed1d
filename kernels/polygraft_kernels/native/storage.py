"""What the native backend keeps between calls: packed weights, adapter slots, keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int64
from dataclasses import dataclass
from weakref import finalize

import torch
from torch import Tensor

from polygraft_kernels.api import Affine, DecoderLayer, KVCache, LoraBank, LoraPair, PackedLinear
from polygraft_kernels.checks import check_affines, check_pairs, require
from polygraft_kernels.native.layouts import (
    Bank,
    Cache,
    Layer,
    Linear,
    LoraSegment,
    LoraSlot,
    address,
    pack_panels,
    unpack_keys,
    unpack_values,
)
from polygraft_kernels.native.pages import Arena, Pages


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """A layer, the dtype of its activations, its struct, and how many adapter slots all of its banks have."""

    layer: DecoderLayer
    dtype: torch.dtype
    struct: Layer
    num_slots: int


class NativeLinear(PackedLinear):
    """Panels in the unit's lane width, bias and scale (of int8 weights) in float32.

    `dtype` is what the activations must be; int8 weights (None) take any.

    `fused` is decoder_layer's: what it knows of the layer that this weight opens, so that both are freed together.
    """

    def __init__(
        self,
        weight: Tensor,
        scale: Tensor | None,
        bias: Tensor | None,
        dtype: torch.dtype | None,
        lanes: int,
        pages: Pages,
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self.dtype = dtype
        self._weight = pack_panels(weight, lanes, pages.zeros)
        self._bias, self._scale = _float_copy(bias), _float_copy(scale)
        self._struct = Linear(
            self._weight.data_ptr(), _pointer(self._bias), _pointer(self._scale), self.in_features, self.out_features
        )
        self.address = address(self._struct)
        self.nbytes = self._weight.nbytes
        self.fused: FusedLayer | None = None


def _float_copy(vector: Tensor | None) -> Tensor | None:
    return None if vector is None else vector.detach().to(torch.float32, copy=True).contiguous()


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class NativeBank(LoraBank):
    """Per slot, all A matrices stacked and packed as one, and one packed B per segment, at their exact ranks; gains and
    shifts in float32.
    """

    def __init__(
        self,
        in_features: int,
        segments: Sequence[int],
        num_slots: int,
        dtype: torch.dtype,
        lanes: int,
        arena: Arena,
    ) -> None:
        self.in_features = in_features
        self.segments = tuple(segments)
        self.num_slots = num_slots
        self.dtype = dtype
        self._lanes = lanes
        self._arena = arena
        self._held: list[tuple[Tensor, ...]] = [()] * num_slots
        finalize(self, _give_back, arena, self._held)
        self._slots = (LoraSlot * num_slots)()
        self._segments = (LoraSegment * (num_slots * len(self.segments)))()
        self._widths = (c_int64 * len(self.segments))(*self.segments)
        self._struct = Bank(self._slots, self._segments, self._widths, len(self.segments), in_features)
        self.address = address(self._struct)

    def load(self, slot: int, pairs: Sequence[LoraPair | None], affines: Sequence[Affine | None] | None = None) -> None:
        check_pairs(self, slot, pairs)
        check_affines(self, affines)
        self.clear(slot)
        first = slot * len(self.segments)
        present = [pair for pair in pairs if pair is not None]
        if present:
            a = self._pack(slot, torch.cat([pair.a.detach().to(self.dtype) for pair in present]))
            self._slots[slot] = LoraSlot(a, sum(pair.a.shape[0] for pair in present))
        for segment, pair in enumerate(pairs):
            if pair is not None:
                b = self._pack(slot, pair.b.detach().to(self.dtype))
                self._segments[first + segment] = LoraSegment(b, pair.a.shape[0], pair.scale)
        for segment, affine in enumerate(() if affines is None else affines):
            if affine is not None:
                self._segments[first + segment].gain = self._keep(slot, affine.gain)
                self._segments[first + segment].shift = self._keep(slot, affine.shift)

    def clear(self, slot: int) -> None:
        require(0 <= slot < self.num_slots, f"slot {slot} is not one of {self.num_slots}")
        self._slots[slot] = LoraSlot()
        for segment in range(len(self.segments)):
            self._segments[slot * len(self.segments) + segment] = LoraSegment()
        held, self._held[slot] = self._held[slot], ()
        _give_back(self._arena, [held])

    def numbers(self, slot: int) -> int:
        """How many numbers the slot holds, padding included."""
        return sum(tensor.numel() for tensor in self._held[slot])

    def check(self) -> None:
        self._arena.check()
        for slot, held in enumerate(self._held):
            first = slot * len(self.segments)
            segments = self._segments[first : first + len(self.segments)]
            assert self._slots[slot].rank == sum(segment.rank for segment in segments)
            affines = [pointer for segment in segments for pointer in (segment.gain, segment.shift)]
            pointers = [self._slots[slot].a, *(segment.b for segment in segments), *affines]
            assert [pointer for pointer in pointers if pointer] == [tensor.data_ptr() for tensor in held]
            assert all((segment.b is None) == (segment.rank == 0) for segment in segments)

    def _pack(self, slot: int, matrix: Tensor) -> int:
        """Where the slot now holds `matrix` in panels."""
        packed = pack_panels(matrix, self._lanes, self._arena.zeros)
        self._held[slot] = (*self._held[slot], packed)
        return packed.data_ptr()

    def _keep(self, slot: int, vector: Tensor | None) -> int | None:
        """Where the slot now holds `vector` in float32."""
        if vector is None:
            return None
        kept = self._arena.zeros(vector.shape, torch.float32).copy_(vector.detach())
        self._held[slot] = (*self._held[slot], kept)
        return kept.data_ptr()


def _give_back(arena: Arena, held: Sequence[Sequence[Tensor]]) -> None:
    for tensors in held:
        for tensor in tensors:
            arena.give_back(tensor)


class NativeCache(KVCache):
    """Keys and values [num_blocks, G, block_size * D], a block laid out as kv.h says."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        lanes: int,
        pages: Pages,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        self._lanes = _cache_lanes(block_size, head_dim, lanes)
        shape = (num_blocks, kv_heads, block_size * head_dim)
        self._keys = pages.zeros(shape, dtype)
        self._values = pages.zeros(shape, dtype)
        self._struct = Cache(
            self._keys.data_ptr(), self._values.data_ptr(), block_size, kv_heads, head_dim, self._lanes
        )
        self.address = address(self._struct)

    def read(self, block_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        ids = torch.tensor(list(block_ids), dtype=torch.int64)
        sizes = (self.block_size, self.head_dim, self._lanes)
        return unpack_keys(self._keys[ids], *sizes), unpack_values(self._values[ids], *sizes)


MAX_HEAD_DIM, MAX_BLOCK_SIZE = 512, 256
"""attention_tile.h: MaxHeadDim and MaxSpan."""


def _cache_lanes(block_size: int, head_dim: int, lanes: int) -> int:
    """The widest vector, at most `lanes`, that divides both sides of a block."""
    small = head_dim <= MAX_HEAD_DIM and block_size <= MAX_BLOCK_SIZE
    fits = small and block_size % 8 == 0 and head_dim % 8 == 0
    require(
        fits,
        f"block size {block_size} and head size {head_dim} are not multiples of 8 "
        f"up to {MAX_BLOCK_SIZE} and {MAX_HEAD_DIM}",
    )
    return lanes if block_size % lanes == 0 and head_dim % lanes == 0 else 8
