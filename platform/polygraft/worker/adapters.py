"""The adapters a worker holds in host memory: loaded off the step loop, within a bound of bytes and of count."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from polygraft_engine.types import EngineError

_THREADS = 4
"""Loads at once: most of a load is waiting for a disk or another machine."""
_FIXED_COST_BYTES = 4 << 20
"""What a load costs however small the adapter is (finding it, opening, checking), told in bytes read meanwhile."""


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


W = TypeVar("W", bound=_Sized)


def _nothing() -> None:
    """No preparation."""


@dataclass(slots=True)
class _Held(Generic[W]):
    """An adapter that is loaded, failed or under way."""

    future: Future[W]
    used: float
    """When somebody last began or ended to use it."""
    pins: int = 0
    nbytes: int = 0
    """0 until it has been loaded."""


class HostAdapters(Generic[W]):
    """The engine's adapter source. All but the loading itself happens on the worker's one thread.

    An adapter is pinned from `acquire` to the matching `release`; the engine finds it with `get` in between. Of the
    others that one leaves first which has wasted most: its idle time times the memory it gives back for what loading
    it again would cost, idle * nbytes / (nbytes + 4 MiB). Of equal sizes, the least recently used; a small adapter
    stays longer than a large one.

    How large an adapter is shows once it is loaded. Those under way count like the largest held or the latest loaded,
    and are few before the first; so the bound of bytes is overstepped only by what turns out larger than those.
    """

    def __init__(
        self,
        load: Callable[[str], W],
        max_count: int,
        max_bytes: int,
        *,
        prepare_thread: Callable[[], None] = _nothing,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`load` is called in threads, each of which has first called `prepare_thread`."""
        self._load = load
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._clock = clock
        self._held: dict[str, _Held[W]] = {}
        self._under_way: set[str] = set()
        self._bytes = 0
        self._latest_nbytes = 0
        """Of the one that was loaded last."""
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="adapters", initializer=prepare_thread)

    def acquire(self, digest: str) -> bool:
        """Pin the adapter, and start to load it if it is not here. False, and nothing is done, when there is no room:
        everything held is in use.
        """
        self._notice()
        held = self._held.get(digest)
        if held is None:
            if not self._make_room():
                return False
            held = _Held(self._threads.submit(self._load, digest), self._clock())
            self._held[digest] = held
            self._under_way.add(digest)
        held.pins += 1
        held.used = self._clock()
        return True

    def release(self, digest: str) -> None:
        """Undo one `acquire`. A failed load is forgotten with its last user, so that it is tried again."""
        held = self._held[digest]
        assert held.pins > 0, "released more often than acquired"
        held.pins -= 1
        held.used = self._clock()
        if held.pins == 0 and held.future.done() and held.future.exception() is not None:
            self._drop(digest)
        self._notice()

    def loaded(self, digest: str) -> bool:
        """Whether loading has ended, one way or the other."""
        return self._held[digest].future.done()

    def get(self, digest: str) -> W:
        """The adapter, which is pinned and has ended loading. Raises what its loading raised."""
        held = self._held.get(digest)
        if held is None or not held.future.done():
            raise EngineError(f"the adapter {digest} is not in host memory")
        return held.future.result()

    def failure(self, digest: str) -> BaseException | None:
        """Why loading failed, of an adapter for which it has ended."""
        return self._held[digest].future.exception(timeout=0)

    def wait(self, digests: Collection[str], timeout: float) -> None:
        """Sleep until one of these has ended loading."""
        wait([self._held[digest].future for digest in digests], timeout, return_when="FIRST_COMPLETED")

    @property
    def count(self) -> int:
        """How many are held."""
        return len(self._held)

    @property
    def nbytes(self) -> int:
        """What the loaded ones take."""
        self._notice()
        return self._bytes

    def close(self) -> None:
        """Stop loading."""
        self._threads.shutdown(cancel_futures=True)

    def check(self) -> None:
        """Assert the bounds, and that the books agree."""
        self._notice()
        assert len(self._held) <= self._max_count
        assert self._under_way <= set(self._held)
        assert self._bytes == sum(held.nbytes for held in self._held.values())
        assert all(held.pins >= 0 for held in self._held.values())
        in_use = sum(held.nbytes for held in self._held.values() if held.pins > 0)
        assert self._bytes <= max(self._max_bytes, in_use), "what nobody uses leaves when it is too much"

    def _notice(self) -> None:
        """Take into the books what has ended loading since the last time, and let leave what is too much then."""
        for digest in [digest for digest in self._under_way if self._held[digest].future.done()]:
            self._under_way.remove(digest)
            held = self._held[digest]
            if held.future.exception() is None:
                held.nbytes = held.future.result().nbytes
                self._bytes += held.nbytes
                self._latest_nbytes = held.nbytes
            elif held.pins == 0:
                self._drop(digest)
        while self._bytes > self._max_bytes and self._evict():
            pass

    def _make_room(self) -> bool:
        """Room for one more, if need be by eviction."""
        while not self._has_room():
            if not self._evict():
                return False
        return True

    def _has_room(self) -> bool:
        if not self._held:
            return True
        if len(self._held) >= self._max_count:
            return False
        expected = max(self._latest_nbytes, *(held.nbytes for held in self._held.values()))
        if expected == 0:
            return len(self._under_way) < _THREADS
        return self._bytes + (len(self._under_way) + 1) * expected <= self._max_bytes

    def _evict(self) -> bool:
        """Let the one leave that has wasted most, if there is any that nobody uses."""
        now = self._clock()
        free = [digest for digest, held in self._held.items() if held.pins == 0 and digest not in self._under_way]
        if not free:
            return False
        self._drop(max(free, key=lambda digest: self._wasted(self._held[digest], now)))
        return True

    def _wasted(self, held: _Held[W], now: float) -> float:
        return (now - held.used) * held.nbytes / (held.nbytes + _FIXED_COST_BYTES)

    def _drop(self, digest: str) -> None:
        self._bytes -= self._held.pop(digest).nbytes
        self._under_way.discard(digest)
