"""Streams for the standard library's archive readers, which take an archive at its word."""

from __future__ import annotations

import io
import os
from typing import IO, Protocol

from polygraft_adapters.types import AdapterError, Problem

MAX_RATIO = 100
FREE_BYTES = 64 << 20
"""What even the smallest archive may unpack to: an untrained adapter is mostly zeros."""
_PIECE = 1 << 20
"""Most that is read at once. An archive's own tables and headers, which its reader takes in whole, need kilobytes."""


def refused(problem: str, hint: str = "") -> AdapterError:
    """An archive that is not opened any further."""
    return AdapterError([Problem("archive", problem, hint)])


class Budget:
    """How many bytes the members of an archive may have, those that nobody wants included."""

    def __init__(self, archive_bytes: int, max_bytes: int) -> None:
        self._ratio_limit = max(FREE_BYTES, MAX_RATIO * archive_bytes)
        self._max_bytes = max_bytes
        self._spent = 0

    def spend(self, count: int) -> None:
        """Raises AdapterError when that is more than an archive of this size may hold."""
        self._spent += count
        if self._spent > self._max_bytes:
            raise refused(f"unpacks to more than {self._max_bytes} bytes", "pack the adapter's two files only")
        if self._spent > self._ratio_limit:
            raise refused(
                f"unpacks to more than {MAX_RATIO} times its size",
                "pack the adapter's two files only, or send them as they are",
            )


class BoundedReads(io.RawIOBase):
    """A file of which nobody gets more than a piece at once. Raises AdapterError for whoever asks."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._file.tell()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(_PIECE + 1 if size < 0 else min(size, _PIECE + 1))
        if len(data) > _PIECE:
            raise refused("has a table of contents that is too long", "pack the adapter's two files only")
        return data


class Readable(Protocol):
    """A stream of decompressed bytes."""

    def read(self, size: int, /) -> bytes: ...


class Forward(io.RawIOBase):
    """A decompressed stream that is only ever read onwards: going back would mean to decompress it all again."""

    def __init__(self, stream: Readable, budget: Budget) -> None:
        self._stream = stream
        self._budget = budget
        self._position = 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence != os.SEEK_SET or offset < self._position:
            raise refused("has members that do not follow one another")
        while self._position < offset:
            if not self.read(min(_PIECE, offset - self._position)):
                break
        return self._position

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= _PIECE:
            raise refused("has a header that is too long", "pack the adapter's two files only")
        data = self._stream.read(size)
        self._budget.spend(len(data))
        self._position += len(data)
        return data
