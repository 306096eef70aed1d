"""C++ kernels for processors: packed weights, fused layers, the same bits whatever else is in the batch."""

from __future__ import annotations

import torch

from polygraft_kernels.api import BackendUnavailable
from polygraft_kernels.native.backend import NativeBackend
from polygraft_kernels.native.units import DTYPES, EMULATED, runnable, unit

__all__ = ["EMULATED", "NativeBackend", "create", "create_isa", "runnable"]


def create(device: torch.device, dtype: torch.dtype) -> NativeBackend:
    """The backend in the fastest instruction set of this processor.

    Raises BackendUnavailable without the compiled library, off the CPU, or for another dtype than float32 or bfloat16.
    """
    if device.type != "cpu":
        raise BackendUnavailable(f"the native backend runs on the cpu, not on {device}")
    if dtype not in DTYPES:
        raise BackendUnavailable(f"the native backend computes in float32 or bfloat16, not {dtype}")
    return NativeBackend(unit())


def create_isa(isa: str) -> NativeBackend:
    """The backend in a given instruction set or emulation, for tests. Raises BackendUnavailable as `create` does."""
    return NativeBackend(unit(isa))
