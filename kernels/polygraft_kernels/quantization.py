"""Weights in 8 bits, made when a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

QUANTIZATIONS = ("int8",)


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """W[n, k] ~ scale[n] * q[n, k]: q int8 [N, K] within -127 .. 127, scale float32 [N]."""

    q: Tensor
    scale: Tensor

    def dequantized(self) -> Tensor:
        """float32 [N, K]."""
        return self.q.float() * self.scale.unsqueeze(1)


def quantize(weight: Tensor) -> Int8Weight:
    """Symmetric, per output channel, to nearest: the largest |W[n, :]| becomes 127. A row of zeros has scale 0."""
    wide = weight.detach().float()
    scale = wide.abs().amax(dim=1) / 127
    q = torch.where(scale.unsqueeze(1) > 0, wide / scale.unsqueeze(1), 0.0).round().to(torch.int8)
    return Int8Weight(q, scale)
