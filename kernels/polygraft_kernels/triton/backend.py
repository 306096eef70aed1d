"""The operations of `api.Backend` as Triton kernels: CUDA and HIP devices, and Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from polygraft_kernels.api import (
    Backend,
    DecoderLayer,
    KVCache,
    LoraBank,
    LoraGroups,
    PackedLinear,
    SampleTensors,
    StepTensors,
)
from polygraft_kernels.checks import check_groups, check_int8, check_rows, check_weight, require
from polygraft_kernels.quantization import Int8Weight
from polygraft_kernels.reference.sampling import sample
from polygraft_kernels.triton import attention, kv, linear, lora, pointwise
from polygraft_kernels.triton.bank import RankBound, TritonBank
from polygraft_kernels.triton.fixed import FixedStep
from polygraft_kernels.triton.kv import TritonCache
from polygraft_kernels.triton.place import place
from polygraft_kernels.triton.tiles import FixedGroups, tensor_of, tiles_of

DTYPES = frozenset({torch.float32, torch.bfloat16})
LONG_CHUNK = 32
"""Rows beyond one a sequence from which wider tiles of attention pay."""


@dataclass(frozen=True, slots=True)
class TritonLinear(PackedLinear):
    """The weight [N, K], contiguous; with `scale` float32 [N] it is int8."""

    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "out_features", self.weight.shape[0])
        object.__setattr__(self, "in_features", self.weight.shape[1])


class TritonBackend(Backend):
    """The fast choice at every number of rows: `linear` is torch's (cuBLAS, hipBLASLt), up to four rows of an adapter
    are multiplied as vectors, long chunks attend in wider tiles. So a row's rounding may depend on how many rows there
    are; `InvariantBackend` gives speed for that.
    """

    name: ClassVar[str] = "triton"
    few_rows: ClassVar[int] = lora.GEMV_ROWS
    """Rows of a slot that are multiplied as vectors."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.dtypes = DTYPES
        self._bound = RankBound()
        self._latest: tuple[LoraGroups, Tensor] | None = None

    @property
    def captures(self) -> bool:
        """Whether a step's kernels can be captured in a graph: the interpreter has none."""
        return self.device.type == "cuda"

    @property
    def capture_key(self) -> int:
        """Graphs captured under another key are no longer good: they have no room for the largest rank."""
        return self._bound.value

    def fixed_step(self, rows: int, blocks: int, adapters: bool) -> FixedStep:
        """Tensors for a captured step of up to `rows` sequences of one row and `blocks` blocks each."""
        return FixedStep(rows, blocks, adapters, self.device)

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> TritonLinear:
        check_weight(weight, bias)
        copied = None if bias is None else bias.detach().to(self.device, copy=True)
        return TritonLinear(weight.detach().to(self.device, copy=True).contiguous(), copied)

    def pack_int8(self, weight: Int8Weight, bias: Tensor | None = None) -> TritonLinear:
        check_int8(weight, bias)
        copied = None if bias is None else bias.detach().to(self.device, copy=True)
        q, scale = (each.to(self.device, copy=True).contiguous() for each in (weight.q, weight.scale))
        return TritonLinear(q, copied, scale)

    def linear(self, x: Tensor, weight: PackedLinear) -> Tensor:
        packed = self._weight(x, weight)
        if packed.scale is not None:
            return self._own_linear(x, packed, x.dtype)
        return functional.linear(x, packed.weight, packed.bias)

    def logits(self, x: Tensor, weight: PackedLinear) -> Tensor:
        return self._own_linear(x, self._weight(x, weight), torch.float32)

    def lora_bank(self, in_features: int, segments: Sequence[int], num_slots: int, dtype: torch.dtype) -> TritonBank:
        require(dtype in self.dtypes, f"a bank of {dtype}; the triton backend computes in float32 and bfloat16")
        return TritonBank(in_features, segments, num_slots, self.device, dtype, self._bound)

    def lora(self, y: Tensor, x: Tensor, bank: LoraBank, groups: LoraGroups) -> None:
        assert isinstance(bank, TritonBank)
        check_rows(x, "x", bank.in_features)
        check_rows(y, "y", sum(bank.segments))
        alike = x.dtype == y.dtype == bank.dtype and x.shape[0] == y.shape[0]
        require(alike, f"x {x.dtype} and y {y.dtype} do not fit each other and a bank of {bank.dtype}")
        lora.lora(y, x, bank, self._tiles(groups, bank, x.shape[0]), self.few_rows)

    def kv_cache(
        self, num_blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> TritonCache:
        require(dtype in self.dtypes, f"a cache of {dtype}; the triton backend computes in float32 and bfloat16")
        return TritonCache(num_blocks, block_size, kv_heads, head_dim, self.device, dtype)

    def store_kv(self, k: Tensor, v: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
        assert isinstance(cache, TritonCache)
        expected = (slot_mapping.shape[0], cache.kv_heads, cache.head_dim)
        for name, given in (("k", k), ("v", v)):
            require(tuple(given.shape) == expected, f"{name} {list(given.shape)} does not fit the cache {expected}")
        kv.store_kv(k, v, cache, slot_mapping)

    def attention(self, q: Tensor, cache: KVCache, step: StepTensors, window: int | None) -> Tensor:
        assert isinstance(cache, TritonCache)
        fits = q.dim() == 3 and q.shape[2] == cache.head_dim and q.shape[1] % cache.kv_heads == 0
        require(fits, f"q {list(q.shape)} does not fit {cache.kv_heads} K/V heads of {cache.head_dim}")
        return attention.attention(q, cache, step, window, self._wide_tiles(q.shape[0], step.context_lens.shape[0]))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        require(x.dim() <= 3 and x.stride(-1) == 1, "rms_norm takes rows, or heads of rows, with unit stride")
        return pointwise.rms_norm(x, weight, eps)

    def rope(self, q: Tensor, k: Tensor, positions: Tensor, table: Tensor) -> None:
        self._check_rope(q.shape[2], table)
        pointwise.rope(q, k, positions, table)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        require(gate_up.shape[-1] % 2 == 0, f"gate_up {list(gate_up.shape)} is not [T, 2 I]")
        check_rows(gate_up, "gate_up", gate_up.shape[-1])
        return pointwise.silu_mul(gate_up)

    def sample(self, logits: Tensor, how: SampleTensors) -> Tensor:
        return sample(logits, how)

    def decoder_layer(
        self, x: Tensor, layer: DecoderLayer, cache: KVCache, step: StepTensors, rope_table: Tensor
    ) -> Tensor:
        return self.decoder(x, (layer,), (cache,), step, rope_table)

    def decoder(
        self,
        x: Tensor,
        layers: Sequence[DecoderLayer],
        caches: Sequence[KVCache],
        step: StepTensors,
        rope_table: Tensor,
    ) -> Tensor:
        """All layers; a residual sum and the norm after it are one pass, across layers too, and so is all that happens
        between the q/k/v projection and attention.
        """
        normed = self.rms_norm(x, layers[0].input_norm, layers[0].eps)
        following = [*(layer.input_norm for layer in layers[1:]), None]
        for layer, cache, next_norm in zip(layers, caches, following, strict=True):
            attended = self._attend(normed, layer, cache, step, rope_table)
            added = self.lora_linear(attended, layer.o, step.groups)
            x, normed = pointwise.add_rms_norm(x, added, layer.post_norm, layer.eps)
            gated = self.silu_mul(self.lora_linear(normed, layer.gate_up, step.groups))
            added = self.lora_linear(gated, layer.down, step.groups)
            if next_norm is None:
                return x + added
            x, normed = pointwise.add_rms_norm(x, added, next_norm, layer.eps)
        raise AssertionError("a decoder has layers")

    def _attend(
        self, normed: Tensor, layer: DecoderLayer, cache: KVCache, step: StepTensors, rope_table: Tensor
    ) -> Tensor:
        assert isinstance(cache, TritonCache)
        rows, q_width = normed.shape[0], layer.heads * layer.head_dim
        self._check_rope(layer.head_dim, rope_table)
        fits = (
            cache.head_dim == layer.head_dim and cache.kv_heads == layer.kv_heads and cache.keys.dtype == normed.dtype
        )
        require(fits, "the cache has other heads, or another dtype than the activations")
        qkv = self.lora_linear(normed, layer.qkv, step.groups)
        place(qkv, layer, cache, step, rope_table)
        q = qkv[:, :q_width].view(rows, layer.heads, layer.head_dim)
        return self.attention(q, cache, step, layer.window).view(rows, q_width)

    def _tiles(self, groups: LoraGroups, bank: LoraBank, rows: int) -> Tensor:
        """The tile list on the device, made once for all layers of a step: it is a function of the groups alone."""
        if isinstance(groups, FixedGroups):
            return groups.tiles
        check_groups(groups, bank, rows)
        if self._latest is None or self._latest[0] != groups:
            self._latest = (groups, tensor_of(tiles_of(groups), self.device))
        return self._latest[1]

    def _own_linear(self, x: Tensor, packed: TritonLinear, dtype: torch.dtype) -> Tensor:
        rows = self._linear_rows(x.shape[0])
        return linear.linear(x, packed.weight, packed.bias, packed.scale, dtype, rows)

    def _linear_rows(self, rows: int) -> int:
        """Rows of a tile."""
        return linear.MANY_ROWS if rows > linear.MANY_ROWS // 2 else linear.LEAST_ROWS

    def _wide_tiles(self, rows: int, sequences: int) -> bool:
        """Whether there are long chunks."""
        return rows >= sequences + LONG_CHUNK

    @staticmethod
    def _check_rope(head_dim: int, table: Tensor) -> None:
        half = head_dim // 2
        require(tuple(table.shape[1:]) == (2, half), f"a rope table of {list(table.shape)} is not [P, 2, {half}]")

    @staticmethod
    def _weight(x: Tensor, weight: PackedLinear) -> TritonLinear:
        assert isinstance(weight, TritonLinear)
        check_rows(x, "x", weight.in_features)
        fits = weight.scale is not None or weight.weight.dtype == x.dtype
        require(fits, f"activations are {x.dtype}, a weight is {weight.weight.dtype}")
        return weight


class InvariantBackend(TritonBackend):
    """A row's bits depend on the row alone, on one kind of device: one tile shape whatever the number of rows."""

    name: ClassVar[str] = "triton-invariant"
    few_rows: ClassVar[int] = 0

    def linear(self, x: Tensor, weight: PackedLinear) -> Tensor:
        return self._own_linear(x, self._weight(x, weight), x.dtype)

    def _linear_rows(self, rows: int) -> int:
        return linear.LEAST_ROWS

    def _wide_tiles(self, rows: int, sequences: int) -> bool:
        return False
