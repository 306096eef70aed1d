"""The adapter slots of every linear layer: prepared adapters in, LoraBanks that the decoder's layers compute with."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from polygraft_engine.models.architecture import ModelSpec
from polygraft_engine.prepared import PROJECTIONS, PreparedAdapter
from polygraft_engine.tables import TableSlots
from polygraft_kernels.api import Backend, LoraBank


@dataclass(frozen=True, slots=True)
class LayerBanks:
    """One layer's banks, one per fused projection."""

    qkv: LoraBank
    o: LoraBank
    gate_up: LoraBank
    down: LoraBank


class AdapterBanks:
    """All layers' banks, filled slot by slot.

    Which adapter is in which slot, and when a slot may be overwritten, is the scheduler's to say. Adapters are
    never changed, so one that left can come back.
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

    def load(self, slot: int, weights: PreparedAdapter) -> None:
        """Make `slot` hold exactly `weights`: what the adapter lacks is cleared. On an error the slot is left empty."""
        try:
            self.tables.load(slot, weights.embedding, weights.head)
            for layer, packed in zip(self.layers, weights.layers, strict=True):
                for projection in PROJECTIONS:
                    bank: LoraBank = getattr(layer, projection)
                    if projection in packed:
                        bank.place(slot, packed[projection])
                    else:
                        bank.clear(slot)
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
