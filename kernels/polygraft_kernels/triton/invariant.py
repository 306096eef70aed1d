"""The Triton kernels in the variant whose results do not depend on the number of rows, as a backend of its own name."""

from __future__ import annotations

import torch

from polygraft_kernels.triton import InvariantBackend, TritonBackend
from polygraft_kernels.triton import create as create_triton

__all__ = ["create"]


def create(device: torch.device, dtype: torch.dtype) -> TritonBackend:
    """As `polygraft_kernels.triton.create`, with one tile shape for any number of rows."""
    return create_triton(device, dtype, InvariantBackend)
