"""The decoder: embedding, layers, final norm and head, on any backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polygraft_adapters import ModuleKey
from polygraft_engine.models.architecture import ModelSpec
from polygraft_kernels.api import Backend, DecoderLayer, KVCache, PackedLinear, StepTensors


@dataclass(frozen=True, slots=True)
class BaseModule:
    """One module of the base as adapters see it: outputs first .. first + width - 1 of `linear`."""

    linear: PackedLinear
    first: int
    squares: Tensor
    """float32 [width]: the squared norm of every row of the weight, as it is computed with."""
    bias: Tensor | None
    """float32 [width]"""

    @property
    def width(self) -> int:
        return self.squares.shape[0]


@dataclass(frozen=True, slots=True)
class Decoder:
    """A model ready to compute. Letters: T rows of a step, K hidden size, V vocabulary, R rows that want logits."""

    spec: ModelSpec
    backend: Backend
    dtype: torch.dtype
    embedding: Tensor
    """[V, K]"""
    layers: tuple[DecoderLayer, ...]
    norm: Tensor
    """[K]"""
    head: BaseModule
    """[V, K]"""
    modules: Mapping[ModuleKey, BaseModule]
    """Every module that adapters may add to."""
    rope: Tensor
    """float32 [positions, 2, head_dim / 2]"""

    @property
    def max_positions(self) -> int:
        """The longest sequence the rotary table reaches."""
        return self.rope.shape[0]

    def embed(self, token_ids: Tensor) -> Tensor:
        """Rows [T, K] of the embedding. token_ids int64 [T]."""
        return torch.embedding(self.embedding, token_ids)

    def forward(self, x: Tensor, step: StepTensors, caches: Sequence[KVCache]) -> Tensor:
        """Hidden rows [T, K] after the last layer, before the final norm; writes keys and values into `caches`, one
        per layer. x [T, K] are embedded tokens, and may be overwritten.
        """
        return self.backend.decoder(x, self.layers, caches, step, self.rope)

    def normed(self, hidden: Tensor) -> Tensor:
        """What the head sees of hidden rows [R, K]."""
        return self.backend.rms_norm(hidden, self.norm, self.spec.eps)

    def kv_caches(self, num_blocks: int, block_size: int) -> tuple[KVCache, ...]:
        """One zeroed cache per layer."""
        spec = self.spec
        return tuple(
            self.backend.kv_cache(num_blocks, block_size, spec.kv_heads, spec.head_dim, self.dtype)
            for _ in range(spec.layers)
        )
