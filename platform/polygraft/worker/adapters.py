"""The adapters a worker holds in host memory: loaded off the step loop, the least recently used leave."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, Protocol, TypeVar

from polygraft_engine.types import EngineError


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


W = TypeVar("W", bound=_Sized)


class HostAdapters(Generic[W]):
    """The engine's adapter source. All but the loading itself happens on the worker's one thread.

    An adapter is pinned from `acquire` to the matching `release`; the engine finds it with `get` in between.
    """

    def __init__(self, load: Callable[[str], W], capacity: int) -> None:
        self._load = load
        self._capacity = capacity
        self._held: OrderedDict[str, Future[W]] = OrderedDict()
        """Loaded, failed or under way; least recently used first."""
        self._pins: Counter[str] = Counter()
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="adapters")

    def acquire(self, digest: str) -> bool:
        """Pin the adapter, and start to load it if it is not here. False, and nothing is done, when there is no room:
        everything held is in use.
        """
        if digest not in self._held:
            if len(self._held) >= self._capacity and not self._evict():
                return False
            self._held[digest] = self._threads.submit(self._load, digest)
        self._held.move_to_end(digest)
        self._pins[digest] += 1
        return True

    def release(self, digest: str) -> None:
        """Undo one `acquire`. A failed load is forgotten with its last user, so that it is tried again."""
        assert self._pins[digest] > 0, "released more often than acquired"
        self._pins[digest] -= 1
        if self._pins[digest] == 0:
            del self._pins[digest]
            future = self._held[digest]
            if future.done() and future.exception() is not None:
                del self._held[digest]

    def loaded(self, digest: str) -> bool:
        """Whether loading has ended, one way or the other."""
        return self._held[digest].done()

    def get(self, digest: str) -> W:
        """The adapter, which is pinned and has ended loading. Raises what its loading raised."""
        future = self._held.get(digest)
        if future is None or not future.done():
            raise EngineError(f"the adapter {digest} is not in host memory")
        return future.result()

    def failure(self, digest: str) -> BaseException | None:
        """Why loading failed, of an adapter for which it has ended."""
        return self._held[digest].exception(timeout=0)

    def wait(self, digests: Collection[str], timeout: float) -> None:
        """Sleep until one of these has ended loading."""
        wait([self._held[digest] for digest in digests], timeout, return_when="FIRST_COMPLETED")

    @property
    def count(self) -> int:
        """How many are held."""
        return len(self._held)

    @property
    def nbytes(self) -> int:
        """What the loaded ones take."""
        done = [future for future in self._held.values() if future.done() and future.exception() is None]
        return sum(future.result().nbytes for future in done)

    def close(self) -> None:
        """Stop loading."""
        self._threads.shutdown(cancel_futures=True)

    def check(self) -> None:
        """Assert the bound, and that what is pinned is held."""
        assert len(self._held) <= self._capacity
        assert set(self._pins) <= set(self._held)
        assert all(count > 0 for count in self._pins.values())

    def _evict(self) -> bool:
        for digest, future in self._held.items():
            if digest not in self._pins and future.done():
                del self._held[digest]
                return True
        return False
