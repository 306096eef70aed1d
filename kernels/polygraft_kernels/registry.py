"""Choosing a backend, once. Backends are imported only when they are asked for."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

import torch

from polygraft_kernels.api import Backend, BackendUnavailable

BACKENDS = {
    "reference": "polygraft_kernels.reference",
    "native": "polygraft_kernels.native",
    "triton": "polygraft_kernels.triton",
    "triton-invariant": "polygraft_kernels.triton.invariant",
}
"""Name -> module offering `create(device: torch.device, dtype: torch.dtype) -> Backend`."""

FASTEST_FIRST = {"cuda": ("triton", "reference"), "cpu": ("native", "reference")}
"""By torch's type of device, which is "cuda" for HIP as well."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The backend that was picked, and why the faster ones were not."""

    backend: Backend
    passed_over: tuple[str, ...]


def choose(name: str, device: torch.device, dtype: torch.dtype) -> Choice:
    """The backend called `name`, or with "auto" the fastest that can run on `device` in `dtype`.

    Raises BackendUnavailable for an unknown name, or one that was asked for and cannot run.
    """
    if name != "auto":
        if name not in BACKENDS:
            known = ", ".join(("auto", *BACKENDS))
            raise BackendUnavailable(f"no kernel backend is called {name!r}; choose one of {known}")
        return Choice(_create(name, device, dtype), ())
    passed_over: list[str] = []
    for candidate in FASTEST_FIRST.get(device.type, ("reference",)):
        try:
            return Choice(_create(candidate, device, dtype), tuple(passed_over))
        except BackendUnavailable as error:
            passed_over.append(f"{candidate}: {error}")
    raise BackendUnavailable("; ".join(passed_over))


def _create(name: str, device: torch.device, dtype: torch.dtype) -> Backend:
    backend = import_module(BACKENDS[name]).create(device, dtype)
    assert isinstance(backend, Backend)
    return backend
