"""Triton kernels for GPUs, through CUDA and HIP; for tests, in Triton's interpreter on host memory."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from polygraft_kernels.api import BackendUnavailable

if find_spec("triton") is None:
    raise BackendUnavailable("Triton is not installed: pip install 'polygraft[gpu]' (Linux on x86-64)")

from polygraft_kernels.triton.backend import DTYPES, InvariantBackend, TritonBackend
from polygraft_kernels.triton.numerics import INTERPRETED

__all__ = ["InvariantBackend", "TritonBackend", "create"]


def create(device: torch.device, dtype: torch.dtype, kind: type[TritonBackend] = TritonBackend) -> TritonBackend:
    """The backend for `device`, a GPU, or the host in a process that runs Triton's interpreter (TRITON_INTERPRET=1).

    Raises BackendUnavailable for other devices and for a dtype other than float32 and bfloat16.
    """
    if dtype not in DTYPES:
        raise BackendUnavailable(f"the Triton kernels compute in float32 and bfloat16, not {dtype}")
    if device.type != "cuda" and not (device.type == "cpu" and INTERPRETED):
        raise BackendUnavailable(f"the Triton kernels run on CUDA and HIP devices, not on {device.type}")
    return kind(device)
