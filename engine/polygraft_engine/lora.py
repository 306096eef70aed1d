"""The adapter slots of every linear layer: AdapterWeights in, LoraBanks that the decoder's layers compute with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from polygraft_adapters.types import ModuleKey
from polygraft_adapters.weights import AdapterWeights
from polygraft_engine.models.architecture import ModelSpec
from polygraft_engine.preparing import PreparedAdapter
from polygraft_engine.tables import TableSlots
from polygraft_kernels.api import Backend, LoraBank, LoraPair

PROJECTIONS = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
"""Fused projection -> the adapter targets that are its segments, in order."""


@dataclass(frozen=True, slots=True)
class LayerBanks:
    """One layer's banks, one per fused projection."""

    qkv: LoraBank
    o: LoraBank
    gate_up: LoraBank
    down: LoraBank


class AdapterBanks:
    """All layers' banks, filled slot by slot.

    Which adapter is in which slot, and when a slot may be overwritten, is the scheduler's to say. Adapters are copied
    and never changed, so one that left can come back.
    """

    def __init__(self, backend: Backend, spec: ModelSpec, num_slots: int, dtype: torch.dtype) -> None:
        shapes = spec.module_shapes("").shapes

        def bank(projection: str) -> LoraBank:
            targets = PROJECTIONS[projection]
            segments = [shapes[target][0] for target in targets]
            return backend.lora_bank(shapes[targets[0]][1], segments, num_slots, dtype)

        self.tables = TableSlots(backend, spec.hidden, spec.vocab, num_slots)
        self.layers = tuple(
            LayerBanks(bank("qkv"), bank("o"), bank("gate_up"), bank("down")) for _ in range(spec.layers)
        )

    def load(self, slot: int, weights: AdapterWeights) -> None:
        """Make `slot` hold exactly `weights`, which have been prepared: what the adapter lacks is cleared. On an error
        the slot is left empty.
        """
        prepared = weights if isinstance(weights, PreparedAdapter) else PreparedAdapter(weights.info, weights.pairs)
        try:
            self.tables.load(slot, prepared.embedding, prepared.head)
            for index, layer in enumerate(self.layers):
                for projection, targets in PROJECTIONS.items():
                    keys = [ModuleKey(index, target) for target in targets]
                    _fill(getattr(layer, projection), slot, keys, prepared)
        except Exception:
            self._clear(slot)
            raise

    def check(self) -> None:
        """Assert every bank's own invariants."""
        self.tables.check()
        for layer in self.layers:
            for projection in PROJECTIONS:
                getattr(layer, projection).check()

    def _clear(self, slot: int) -> None:
        self.tables.clear(slot)
        for layer in self.layers:
            for projection in PROJECTIONS:
                getattr(layer, projection).clear(slot)


def _fill(bank: LoraBank, slot: int, keys: Sequence[ModuleKey], weights: PreparedAdapter) -> None:
    pairs = [_pair(weights, key) for key in keys]
    affines = [weights.affines.get(key) for key in keys]
    if all(each is None for each in (*pairs, *affines)):
        bank.clear(slot)
    elif weights.affines:
        bank.load(slot, pairs, affines)
    else:
        bank.load(slot, pairs)


def _pair(weights: AdapterWeights, key: ModuleKey) -> LoraPair | None:
    delta = weights.pairs.get(key)
    return None if delta is None else LoraPair(delta.a, delta.b, delta.scale)
