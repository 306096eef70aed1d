"""Folders of adapters on their way in. Each has one owner: a living process, or a name that the database knows.

`recv_…` belongs to whoever holds its lock and is gone with that process; `adv_…` is of a version that is being
validated, `upl_…` of a resumable upload: those outlive a gateway, so that the next one goes on with them.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import IO, Protocol, Self

from polygraft.errors import ApiError, unavailable

_LOCK = ".lock"
_ARCHIVE = "archive"
_RECEIVING = "recv_"
FLOOR = 1 << 30
"""Bytes of the file system that uploads leave free: databases, logs and blobs may lie on it too."""
LOOK_BYTES = 64 << 20
"""How many come in between one look at the room that is left and the next."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
VERSION = "adv_"
UPLOAD = "upl_"

RequireRoom = Callable[[int], Awaitable[None]]
"""Raises ApiError 503 where there is no room for so many bytes more."""


class StagingSource(Protocol):
    """The part of the blob store that is used here."""

    def staging_folder(self) -> Path:
        """A fresh folder on the file system of the blobs."""


class Staged:
    """A folder that this process owns. As a context it takes the folder with it, unless it has been named."""

    def __init__(self, path: Path, lock: IO[str]) -> None:
        self.path = path
        self._lock = lock
        self.named = False
        """Whether the database knows of it, so that another gateway can go on with what is in it."""

    @property
    def archive(self) -> Path:
        """Where an archive goes."""
        return self.path / _ARCHIVE

    @property
    def adapter(self) -> Path:
        """The folder of the adapter's own files; whoever writes the first makes it."""
        return self.path / "adapter"

    @property
    def converted(self) -> Path:
        """Where an adapter in another form goes as PEFT would have written it."""
        return self.path / "converted"

    async def name_after(self, object_id: str) -> None:
        """Make it the folder of a version or an upload."""
        await asyncio.to_thread(self._rename, object_id)

    def _rename(self, object_id: str) -> None:
        self.path = self.path.rename(self.path.with_name(object_id))
        self.named = True

    async def remove(self) -> None:
        """Delete it with all that is in it; no error if it is gone."""
        await asyncio.to_thread(shutil.rmtree, self.path, ignore_errors=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if not self.named:
                # Whoever cancels the receiving waits for this one step still: nothing is to be left behind.
                await asyncio.shield(self.remove())
        finally:
            self._lock.close()


class Staging:
    """Makes, finds and sweeps the folders."""

    def __init__(self, source: StagingSource) -> None:
        self._source = source

    async def fresh(self) -> Staged:
        """A new folder, the caller's alone."""
        return await asyncio.to_thread(self._fresh)

    async def take(self, object_id: str, *, create: bool = False) -> Staged | None:
        """The named folder, locked. None while somebody else has it, and when it does not exist."""
        return await asyncio.to_thread(self._take, self._root / object_id, create)

    async def require_room(self, size: int) -> None:
        """Raise ApiError 503 if `size` more bytes would leave less than FLOOR free."""
        if await asyncio.to_thread(self._free) - size < FLOOR:
            raise _no_room()

    def exists(self, object_id: str) -> bool:
        """Whether there is a folder of this name, whoever has it."""
        return (self._root / object_id).is_dir()

    def archive_size(self, object_id: str) -> int:
        """Bytes of the archive in the named folder; 0 before there is one."""
        try:
            return (self._root / object_id / _ARCHIVE).stat().st_size
        except FileNotFoundError:
            return 0

    def names(self) -> list[str]:
        """Every named folder that exists."""
        return [path.name for path in self._root.iterdir() if path.name.startswith((VERSION, UPLOAD))]

    async def sweep(self, stale: Collection[str]) -> None:
        """Delete the folders of nobody: receivers that are dead, and the `stale` names unless somebody has them."""
        await asyncio.to_thread(self._sweep, frozenset(stale))

    def _free(self) -> int:
        return shutil.disk_usage(self._root).free

    def _fresh(self) -> Staged:
        made = self._source.staging_folder()
        lock = _locked(made)
        assert lock is not None, "nobody else knows of the folder yet"
        return Staged(made.rename(made.with_name(f"{_RECEIVING}{secrets.token_hex(12)}")), lock)

    def _take(self, path: Path, create: bool) -> Staged | None:
        if create:
            path.mkdir(exist_ok=True)
        if not path.is_dir():
            return None
        lock = _locked(path)
        if lock is None:
            return None
        staged = Staged(path, lock)
        staged.named = True
        return staged

    def _sweep(self, stale: frozenset[str]) -> None:
        for path in self._root.iterdir():
            mine = path.name.startswith(_RECEIVING) or path.name in stale
            if mine and (lock := _locked(path)) is not None:
                shutil.rmtree(path, ignore_errors=True)
                lock.close()

    @cached_property
    def _root(self) -> Path:
        # The blob store tells its staging place only by making a folder there.
        probe = self._source.staging_folder()
        probe.rmdir()
        return probe.parent


@contextmanager
def refusing_when_full() -> Iterator[None]:
    """A disk that is full after all is ApiError 503, too."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise _no_room() from None


def _no_room() -> ApiError:
    return unavailable("There is no room for uploads just now.", retry_after=60)


def _locked(folder: Path) -> IO[str] | None:
    """The folder's lock, which the kernel lets go of when this process ends. None while another holds it."""
    try:
        file = (folder / _LOCK).open("a")
    except (FileNotFoundError, NotADirectoryError):
        return None
    with suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Whoever had it before may have deleted the folder.
        if os.fstat(file.fileno()).st_nlink > 0:
            return file
    file.close()
    return None
