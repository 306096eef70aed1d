"""Memory for what every step reads again: weights, adapters, keys and values, in huge pages where there are some.

In pages of 4 KiB a decode step misses the address cache every few microseconds, and the processor's prefetchers stop at
each page's end. On a Zen 3 server products of 16 rows run a quarter faster in pages of 2 MiB.
"""

from __future__ import annotations

import mmap
from bisect import bisect
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from threading import Lock

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
CHUNK = 32 << 20
"""Bytes asked of the system at a time; a chunk is given back when the last tensor in it is gone."""
LINE = 64


class Pages:
    """Hands out aligned tensors from chunks of huge pages. Not for tensors that come and go: a chunk lives as long as
    its longest-lived tensor.
    """

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor that starts on a cache line, with readable memory before it."""
        shape = tuple(shape)
        size = dtype.itemsize * torch.Size(shape).numel()
        needed = LINE + -(-size // LINE) * LINE
        if self._used + needed > self._chunk.numel():
            self._chunk = _huge_pages(max(CHUNK, -(-needed // HUGE_PAGE) * HUGE_PAGE))
            self._used = 0
        start = self._used + LINE
        self._used += needed
        return self._chunk[start : start + size].view(dtype).view(shape)


class Arena:
    """Huge pages for weights, of which adapters' come and go: first fit, and free neighbours are one again.

    Memory goes back to the system when a whole chunk is free. Any thread may use it.
    """

    def __init__(self) -> None:
        self._chunks: dict[int, _Chunk] = {}
        self._returned: deque[tuple[int, int]] = deque()
        """Addresses and sizes to be taken back: collecting garbage may return some in the midst of `zeros`."""
        self._lock = Lock()

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor that starts on a cache line, with readable memory before it. It must be given back."""
        shape = tuple(shape)
        size = dtype.itemsize * torch.Size(shape).numel()
        needed = -(-size // LINE) * LINE
        with self._lock:
            self._take_back()
            chunk, start = self._take(needed)
        return chunk.memory[start : start + size].zero_().view(dtype).view(shape)

    def give_back(self, tensor: Tensor) -> None:
        """Take back the memory of a tensor that `zeros` made; nobody may use it any more."""
        self._returned.append((tensor.data_ptr(), -(-tensor.nbytes // LINE) * LINE))
        if self._lock.acquire(blocking=False):
            try:
                self._take_back()
            finally:
                self._lock.release()

    def _take_back(self) -> None:
        while self._returned:
            address, size = self._returned.popleft()
            base = max(first for first in self._chunks if first <= address)
            self._chunks[base].give(address - base, size)
            if self._chunks[base].is_free:
                del self._chunks[base]

    def _take(self, needed: int) -> tuple[_Chunk, int]:
        for chunk in self._chunks.values():
            start = chunk.take(needed)
            if start is not None:
                return chunk, start
        chunk = _Chunk(_huge_pages(max(CHUNK, -(-(needed + LINE) // HUGE_PAGE) * HUGE_PAGE)))
        start = chunk.take(needed)
        assert start is not None, "a new chunk has room for what it was made for"
        self._chunks[chunk.memory.data_ptr()] = chunk
        return chunk, start

    def check(self) -> None:
        """Assert that what is free lies in order and apart, inside its chunk."""
        for chunk in self._chunks.values():
            spans = [(LINE, 0), *chunk.free, (chunk.memory.numel() + 1, 0)]
            assert all(size > 0 for _, size in chunk.free)
            assert all(start + size <= after for (start, size), (after, _) in pairwise(spans))
            assert all(start + size < after for (start, size), (after, _) in pairwise(spans[1:]))

    @property
    def used(self) -> int:
        """Bytes handed out, rounded up to cache lines."""
        return sum(chunk.memory.numel() - LINE - sum(size for _, size in chunk.free) for chunk in self._chunks.values())


class _Chunk:
    """Bytes of the system's, and which of them are free: (start, size), ascending, never two side by side."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.free = [(LINE, memory.numel() - LINE)]

    @property
    def is_free(self) -> bool:
        return self.free == [(LINE, self.memory.numel() - LINE)]

    def take(self, size: int) -> int | None:
        """Where `size` bytes are free; None if nowhere."""
        for index, (start, room) in enumerate(self.free):
            if room >= size:
                self.free[index : index + 1] = [(start + size, room - size)] if room > size else []
                return start
        return None

    def give(self, start: int, size: int) -> None:
        index = bisect(self.free, (start, 0))
        if index < len(self.free) and self.free[index][0] == start + size:
            size += self.free.pop(index)[1]
        if index > 0 and sum(self.free[index - 1]) == start:
            index -= 1
            before, room = self.free.pop(index)
            start, size = before, room + size
        self.free.insert(index, (start, size))


def _huge_pages(size: int) -> Tensor:
    """`size` zero bytes, aligned to huge pages; ordinary memory where the system has none. Taken up when written to."""
    memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them refuses the advice, and all else works
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return whole[-whole.data_ptr() % HUGE_PAGE :][:size]
