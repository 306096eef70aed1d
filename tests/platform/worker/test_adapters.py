"""The adapters in a worker's host memory."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

from polygraft.worker.adapters import HostAdapters
from polygraft_engine.types import EngineError


class Weights:
    """What a loader returns."""

    nbytes = 100

    def __init__(self, digest: str) -> None:
        self.digest = digest


class Loader:
    """Counts its loads; `gate` holds them up."""

    def __init__(self) -> None:
        self.loads: list[str] = []
        self.alive: weakref.WeakSet[Weights] = weakref.WeakSet()
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, digest: str) -> Weights:
        self.gate.wait(5)
        self.loads.append(digest)
        if digest == "broken":
            raise EngineError("broken")
        weights = Weights(digest)
        self.alive.add(weights)
        return weights


@pytest.fixture
def loader() -> Loader:
    return Loader()


@pytest.fixture
def adapters(loader: Loader) -> Iterator[HostAdapters[Weights]]:
    held = HostAdapters(loader, 2)
    yield held
    loader.gate.set()
    held.close()
    held.check()


def use(adapters: HostAdapters[Weights], digest: str) -> Weights:
    assert adapters.acquire(digest)
    adapters.wait([digest], 5)
    weights = adapters.get(digest)
    adapters.release(digest)
    return weights


def test_loading_happens_aside(adapters: HostAdapters[Weights], loader: Loader) -> None:
    loader.gate.clear()
    assert adapters.acquire("a")
    assert not adapters.loaded("a")
    with pytest.raises(EngineError, match="not in host memory"):
        adapters.get("a")
    loader.gate.set()
    adapters.wait(["a"], 5)
    assert adapters.get("a").digest == "a"
    assert adapters.failure("a") is None


def test_the_least_recently_used_leaves(adapters: HostAdapters[Weights], loader: Loader) -> None:
    for digest in ("a", "b", "a", "c", "a", "b"):
        use(adapters, digest)
    assert loader.loads == ["a", "b", "c", "b"]


def test_what_is_in_use_stays_and_newcomers_wait(adapters: HostAdapters[Weights]) -> None:
    assert adapters.acquire("a")
    assert adapters.acquire("a")
    assert adapters.acquire("b")
    assert not adapters.acquire("c")
    adapters.wait(["a"], 5)
    adapters.release("a")
    assert not adapters.acquire("c")
    adapters.release("a")
    assert adapters.acquire("c")
    adapters.check()


def test_a_failed_load_is_told_and_tried_again_later(adapters: HostAdapters[Weights], loader: Loader) -> None:
    for _ in range(2):
        assert adapters.acquire("broken")
        adapters.wait(["broken"], 5)
        assert str(adapters.failure("broken")) == "broken"
        adapters.release("broken")
    assert loader.loads == ["broken", "broken"]
    assert adapters.count == 0


def test_memory_stays_flat_however_many_pass_through(adapters: HostAdapters[Weights], loader: Loader) -> None:
    for number in range(200):
        use(adapters, str(number))
    gc.collect()
    assert (adapters.count, adapters.nbytes) == (2, 200)
    assert len(loader.alive) <= 2
