"""The adapters in a worker's host memory."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from polygraft.worker.adapters import HostAdapters
from polygraft_engine.types import EngineError

MIB = 1 << 20


class Weights:
    """What a loader returns: as many MiB as its name says after a colon, else 1."""

    def __init__(self, digest: str) -> None:
        self.digest = digest
        self.nbytes = int(digest.partition(":")[2] or 1) * MIB


class Loader:
    """Notes its loads; `gate` holds them up."""

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
    held = HostAdapters(loader, 2, 1 << 30)
    yield held
    loader.gate.set()
    held.check()
    held.close()


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
    assert (adapters.count, adapters.nbytes) == (2, 2 * MIB)
    assert len(loader.alive) <= 2


@dataclass
class Clock:
    """Moves when it is told to."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def bounded(loader: Loader, clock: Clock) -> Iterator[HostAdapters[Weights]]:
    """Room for any number of adapters, and for 10 MiB."""
    held = HostAdapters(loader, 100, 10 * MIB, clock=clock)
    yield held
    loader.gate.set()
    held.check()
    held.close()


def test_memory_is_bounded_in_bytes(bounded: HostAdapters[Weights], loader: Loader, clock: Clock) -> None:
    for number in range(200):
        clock.now += 1
        use(bounded, f"{number}:{number % 4 + 1}")
        bounded.check()
        assert bounded.nbytes <= 10 * MIB
    gc.collect()
    assert sum(weights.nbytes for weights in loader.alive) <= 10 * MIB


def test_of_equal_sizes_the_least_recently_used_leaves(bounded: HostAdapters[Weights], clock: Clock) -> None:
    for digest in ("a:4", "b:4", "a:4", "c:4"):
        clock.now += 1
        use(bounded, digest)
    assert bounded.acquire("a:4")
    assert bounded.loaded("a:4")
    assert bounded.count == 2


def test_a_large_one_leaves_before_a_small_one_of_the_same_age(
    bounded: HostAdapters[Weights], loader: Loader, clock: Clock
) -> None:
    for digest in ("small:1", "large:6", "other:4"):
        clock.now += 1
        use(bounded, digest)
    assert bounded.nbytes == 5 * MIB
    use(bounded, "small:1")
    assert loader.loads == ["small:1", "large:6", "other:4"]


def test_an_old_small_one_leaves_in_the_end(bounded: HostAdapters[Weights], loader: Loader, clock: Clock) -> None:
    use(bounded, "small:1")
    for number in range(100):
        clock.now += 1
        use(bounded, f"{number}:3")
    use(bounded, "small:1")
    assert loader.loads.count("small:1") == 2


def test_what_is_in_use_is_never_evicted_and_too_much_leaves_when_it_is_released(
    bounded: HostAdapters[Weights], loader: Loader
) -> None:
    loader.gate.clear()
    digests = ["a:8", "b:8", "c:8"]
    assert all(bounded.acquire(digest) for digest in digests)
    loader.gate.set()
    for digest in digests:
        bounded.wait([digest], 5)
    bounded.check()
    assert bounded.nbytes == 24 * MIB
    assert not bounded.acquire("d:1")
    for digest in digests:
        assert bounded.get(digest).digest == digest
    for digest in digests:
        bounded.release(digest)
        bounded.check()
    assert bounded.nbytes == 8 * MIB


def test_one_that_is_larger_than_the_bound_is_served_alone(bounded: HostAdapters[Weights]) -> None:
    use(bounded, "a:2")
    assert bounded.acquire("huge:50")
    bounded.wait(["huge:50"], 5)
    assert bounded.get("huge:50").nbytes == 50 * MIB
    assert not bounded.acquire("a:3")
    bounded.release("huge:50")
    assert (bounded.count, bounded.nbytes) == (0, 0)
    assert bounded.acquire("a:3")


def test_loads_under_way_count_before_their_size_is_known(bounded: HostAdapters[Weights], loader: Loader) -> None:
    use(bounded, "a:3")
    loader.gate.clear()
    assert [bounded.acquire(f"{number}:3") for number in range(3)] == [True, True, True]
    assert not bounded.acquire("more:3")


def test_few_are_loaded_at_once_while_no_size_is_known(bounded: HostAdapters[Weights], loader: Loader) -> None:
    loader.gate.clear()
    assert [bounded.acquire(str(number)) for number in range(6)] == [True] * 4 + [False] * 2


def test_loads_run_beside_each_other(loader: Loader) -> None:
    meeting = threading.Barrier(2, timeout=5)

    def load(digest: str) -> Weights:
        meeting.wait()
        return Weights(digest)

    adapters = HostAdapters(load, 10, 1 << 30)
    assert adapters.acquire("a")
    assert adapters.acquire("b")
    for digest in ("a", "b"):
        adapters.wait([digest], 5)
        assert adapters.get(digest).digest == digest
    adapters.close()


def test_a_load_that_fails_after_its_last_user_left_is_forgotten(
    adapters: HostAdapters[Weights], loader: Loader
) -> None:
    loader.gate.clear()
    assert adapters.acquire("broken")
    adapters.release("broken")
    loader.gate.set()
    for _ in range(500):
        if adapters.nbytes == 0 and adapters.count == 0:
            break
        time.sleep(0.01)
    assert adapters.count == 0
