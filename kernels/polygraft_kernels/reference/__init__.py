"""Every operation in plain torch: the specification the other backends are held to."""

from __future__ import annotations

import torch

from polygraft_kernels.api import BackendUnavailable
from polygraft_kernels.reference.backend import DTYPES, ReferenceBackend

__all__ = ["ReferenceBackend", "create"]


def create(device: torch.device, dtype: torch.dtype) -> ReferenceBackend:
    """The backend for `device`. Raises BackendUnavailable for a dtype other than float32, bfloat16 or float16."""
    if dtype not in DTYPES:
        raise BackendUnavailable(f"the reference backend computes in float32, bfloat16 or float16, not {dtype}")
    return ReferenceBackend(device)
