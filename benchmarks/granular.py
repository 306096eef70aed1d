"""A native backend whose steps enter as many parallel regions as it is told: one, one a layer, or one an operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor

from polygraft_kernels.api import Backend, DecoderLayer, KVCache, StepTensors
from polygraft_kernels.native import NativeBackend, create_isa

Grain = Literal["step", "layer", "operation"]
GRAINS: tuple[Grain, ...] = ("step", "layer", "operation")


class GranularBackend(NativeBackend):
    """`grain` may change between two steps: all compute the same."""

    def __init__(self, grain: Grain = "step") -> None:
        super().__init__(create_isa(None).unit)
        self.grain = grain

    def decoder(
        self,
        x: Tensor,
        layers: Sequence[DecoderLayer],
        caches: Sequence[KVCache],
        step: StepTensors,
        rope_table: Tensor,
    ) -> Tensor:
        if self.grain == "step":
            return super().decoder(x, layers, caches, step, rope_table)
        return Backend.decoder(self, x, layers, caches, step, rope_table)

    def decoder_layer(
        self, x: Tensor, layer: DecoderLayer, cache: KVCache, step: StepTensors, rope_table: Tensor
    ) -> Tensor:
        if self.grain == "layer":
            return super().decoder(x, (layer,), (cache,), step, rope_table)
        return Backend.decoder_layer(self, x, layer, cache, step, rope_table)


B = TypeVar("B", bound=GranularBackend)


class Making(Generic[B]):
    """Makes a backend when the registry wants one, and keeps it for whoever looks at it then."""

    def __init__(self, kind: type[B]) -> None:
        self._kind = kind
        self.latest: B | None = None

    def __call__(self, device: torch.device, dtype: torch.dtype) -> B:
        self.latest = self._kind()
        return self.latest


create = Making(GranularBackend)
"""For the registry of backends."""
