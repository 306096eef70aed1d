"""The decoder: embedding, layers, final norm and head, on any backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polygraft_engine.models.architecture import ModelSpec
from polygraft_kernels.api import Backend, DecoderLayer, KVCache, PackedLinear, StepTensors


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
    head: PackedLinear
    """[V, K]"""
    rope: Tensor
    """float32 [positions, 2, head_dim / 2]"""

    @property
    def max_positions(self) -> int:
        """The longest sequence the rotary table reaches."""
        return self.rope.shape[0]

    def forward(self, token_ids: Tensor, step: StepTensors, caches: Sequence[KVCache]) -> Tensor:
        """Hidden rows [T, K] after the last layer, before the final norm; writes keys and values into `caches`, one
        per layer. token_ids int64 [T].
        """
        x = torch.embedding(self.embedding, token_ids)
        return self.backend.decoder(x, self.layers, caches, step, self.rope)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [R, V] from hidden rows [R, K]."""
        normed = self.backend.rms_norm(hidden, self.norm, self.spec.eps)
        return self.backend.logits(normed, self.head)

    def kv_caches(self, num_blocks: int, block_size: int) -> tuple[KVCache, ...]:
        """One zeroed cache per layer."""
        spec = self.spec
        return tuple(
            self.backend.kv_cache(num_blocks, block_size, spec.kv_heads, spec.head_dim, self.dtype)
            for _ in range(spec.layers)
        )
