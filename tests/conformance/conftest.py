"""One suite over every backend: those of the registry, and each instruction set of the native one that runs here.

The Triton kernels run on a GPU that is torch's default device, or in a process of Triton's interpreter
(TRITON_INTERPRET=1); elsewhere they are no backend, and `tests/kernels/triton` starts that process.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from polygraft_kernels.api import Backend, BackendUnavailable
from polygraft_kernels.native import EMULATED, create_isa, runnable
from polygraft_kernels.registry import BACKENDS, choose

NATIVE = [*runnable(), *(name for name, needed in EMULATED.items() if needed in runnable())]
DEVICE = torch.get_default_device()
TRITON = [name for name in BACKENDS if name.startswith("triton")]


def _can_run(name: str) -> bool:
    try:
        choose(name, DEVICE, torch.float32)
    except BackendUnavailable:
        return False
    return True


OTHERS = [name for name in BACKENDS if name != "native" and (name not in TRITON or _can_run(name))]


def _backend(name: str) -> Backend:
    return choose(name, DEVICE, torch.float32).backend if name in OTHERS else create_isa(name)


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    with np.errstate(all="ignore"):  # the interpreter computes with numpy, which warns of infinities
        yield


def _widely(names: list[str]) -> list[object]:
    """All of them; by default only the reference and the fastest instruction set, which is what `auto` takes here."""
    quick = {*OTHERS, runnable()[-1]}
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in names]


@pytest.fixture(params=_widely([*OTHERS, *NATIVE]), scope="session")
def backend(request: pytest.FixtureRequest) -> Backend:
    """Every backend in turn."""
    return _backend(request.param)


@pytest.fixture(params=_widely(NATIVE), scope="session")
def native(request: pytest.FixtureRequest) -> Backend:
    """Every instruction set of the native backend: those that promise the same bits whatever the batch."""
    return _backend(request.param)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"], scope="session")
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """The dtypes that every backend offers."""
    return request.param


@pytest.fixture(params=[1, 2], ids=["1-thread", "2-threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Torch's number of threads, and so the kernels'."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
