"""What the native backend keeps between calls: packed weights, adapter slots, keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int64
from dataclasses import dataclass
from weakref import finalize

import torch
from torch import Tensor

from polygraft_kernels.api import Affine, DecoderLayer, KVCache, LoraBank, LoraPair, PackedLinear, PackedLora
from polygraft_kernels.checks import check_affines, check_pairs, check_slot, require
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

    `dtype` is what the activations must be; int8 weights (None) take any. The panels go back to the arena with this:
    an adapter's own head comes and goes.

    `fused` is decoder_layer's: what it knows of the layer that this weight opens, so that both are freed together.
    """

    def __init__(
        self,
        weight: Tensor,
        scale: Tensor | None,
        bias: Tensor | None,
        dtype: torch.dtype | None,
        lanes: int,
        arena: Arena,
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self.dtype = dtype
        self._weight = pack_panels(weight, lanes, arena.zeros)
        finalize(self, arena.give_back, self._weight)
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


class NativeLora(PackedLora):
    """All A matrices stacked and packed as one, and one packed B per segment, at their exact ranks; gains and shifts in
    float32. Its memory goes back to the arena with the last slot or owner that holds it.
    """

    def __init__(self, arena: Arena) -> None:
        self.slot = LoraSlot()
        self.segments: list[LoraSegment] = []
        self.tensors: list[Tensor] = []
        self._arena = arena
        finalize(self, _give_back, arena, self.tensors)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Memory that the tensors take."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def add_panels(self, matrix: Tensor, lanes: int) -> int:
        """Where `matrix` now lies in panels."""
        return self._keep(pack_panels(matrix, lanes, self._arena.zeros))

    def add_vector(self, vector: Tensor | None) -> int | None:
        """Where `vector` now lies in float32."""
        if vector is None:
            return None
        return self._keep(self._arena.zeros(vector.shape, torch.float32).copy_(vector.detach()))

    def _keep(self, tensor: Tensor) -> int:
        self.tensors.append(tensor)
        return tensor.data_ptr()


class NativeBank(LoraBank):
    """Per slot, where what it holds lies."""

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
        self._held: list[NativeLora | None] = [None] * num_slots
        self._slots = (LoraSlot * num_slots)()
        self._segments = (LoraSegment * (num_slots * len(self.segments)))()
        self._widths = (c_int64 * len(self.segments))(*self.segments)
        self._struct = Bank(self._slots, self._segments, self._widths, len(self.segments), in_features)
        self.address = address(self._struct)

    def pack(self, pairs: Sequence[LoraPair | None], affines: Sequence[Affine | None] | None = None) -> NativeLora:
        check_pairs(self, pairs)
        check_affines(self, affines)
        packed = NativeLora(self._arena)
        present = [pair for pair in pairs if pair is not None]
        if present:
            a = packed.add_panels(torch.cat([pair.a.detach().to(self.dtype) for pair in present]), self._lanes)
            packed.slot = LoraSlot(a, sum(pair.a.shape[0] for pair in present))
        for pair, affine in zip(pairs, [None] * len(pairs) if affines is None else affines, strict=True):
            segment = LoraSegment()
            if pair is not None:
                segment.b = packed.add_panels(pair.b.detach().to(self.dtype), self._lanes)
                segment.rank, segment.scale = pair.a.shape[0], pair.scale
            if affine is not None:
                segment.gain, segment.shift = packed.add_vector(affine.gain), packed.add_vector(affine.shift)
            packed.segments.append(segment)
        return packed

    def place(self, slot: int, packed: PackedLora) -> None:
        assert isinstance(packed, NativeLora)
        check_slot(self, slot)
        self._write(slot, packed.slot, packed.segments)
        self._held[slot] = packed

    def clear(self, slot: int) -> None:
        check_slot(self, slot)
        if self._held[slot] is not None:
            self._write(slot, LoraSlot(), [LoraSegment()] * len(self.segments))
            self._held[slot] = None

    def numbers(self, slot: int) -> int:
        """How many numbers the slot holds, padding included."""
        held = self._held[slot]
        return 0 if held is None else sum(tensor.numel() for tensor in held.tensors)

    def check(self) -> None:
        self._arena.check()
        for slot, held in enumerate(self._held):
            first = slot * len(self.segments)
            segments = self._segments[first : first + len(self.segments)]
            assert self._slots[slot].rank == sum(segment.rank for segment in segments)
            parts = [pointer for segment in segments for pointer in (segment.b, segment.gain, segment.shift)]
            pointers = [pointer for pointer in (self._slots[slot].a, *parts) if pointer]
            assert pointers == ([] if held is None else [tensor.data_ptr() for tensor in held.tensors])
            assert all((segment.b is None) == (segment.rank == 0) for segment in segments)

    def _write(self, slot: int, matrices: LoraSlot, segments: Sequence[LoraSegment]) -> None:
        self._slots[slot] = matrices
        first = slot * len(self.segments)
        for index, segment in enumerate(segments):
            self._segments[first + index] = segment


def _give_back(arena: Arena, tensors: Sequence[Tensor]) -> None:
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
