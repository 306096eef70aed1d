"""How the base model's matrices are kept, and what is remembered of them besides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from polygraft_engine.types import EngineError
from polygraft_kernels.api import Backend, PackedLinear
from polygraft_kernels.quantization import QUANTIZATIONS, quantize

NORM_ROWS = 64


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight as the backend keeps it, and float32 [N]: the squared norms of its rows, as they are computed with."""

    linear: PackedLinear
    squares: Tensor


PackWeight = Callable[[Tensor, Tensor | None], Packed]
"""weight [N, K], bias [N] or None."""


def weight_packer(backend: Backend, quantization: str | None) -> PackWeight:
    """How the base model's matrices are kept. Raises EngineError for a quantization that nobody knows."""

    def pack_plain(weight: Tensor, bias: Tensor | None) -> Packed:
        return Packed(backend.pack_linear(weight, bias), _squares(weight).to(backend.device))

    def pack_int8(weight: Tensor, bias: Tensor | None) -> Packed:
        quantized = quantize(weight)
        squares = _squares(quantized.q) * quantized.scale.square()
        return Packed(backend.pack_int8(quantized, bias), squares.to(backend.device))

    if quantization is None:
        return pack_plain
    if quantization not in QUANTIZATIONS:
        raise EngineError(f"quantization {quantization!r} is not one of {', '.join(QUANTIZATIONS)}")
    return pack_int8


def _squares(weight: Tensor) -> Tensor:
    """float32 [N]: the squared norms of the rows of [N, K]."""
    # in parts that a core's cache holds: a copy of the whole in float32 would take longer to write than to sum
    return torch.cat([part.float().square().sum(dim=1) for part in torch.split(weight, NORM_ROWS)])
