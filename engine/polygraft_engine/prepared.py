"""An adapter as slots take it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from polygraft_adapters.weights import AdapterWeights
from polygraft_engine.tables import EmbeddingPatch, HeadPatch
from polygraft_kernels.api import PackedLora

PROJECTIONS = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
"""Fused projection -> the adapter targets that are its segments, in order."""


@dataclass(frozen=True, slots=True)
class PreparedAdapter(AdapterWeights):
    """What an adapter adds to one model, packed; its own tensors have gone into that and are empty here."""

    layers: tuple[Mapping[str, PackedLora], ...] = ()
    """One per layer: what is added to each fused projection; those that the adapter leaves alone are absent."""
    embedding: EmbeddingPatch | None = None
    head: HeadPatch | None = None

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        packed = sum(each.nbytes for layer in self.layers for each in layer.values())
        return packed + sum(patch.nbytes for patch in (self.embedding, self.head) if patch is not None)

    def check(self) -> None:
        """Assert that nothing is left to prepare."""
        assert not list(self.tensors)
        assert all(layer.keys() <= PROJECTIONS.keys() for layer in self.layers)
