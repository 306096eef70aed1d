"""The blob store in a folder. A digest names its content for ever: nothing in it is changed."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from polygraft.blobs.contents import MANIFEST_NAME, Manifest, digest_of, hex_of, manifest_of, sha256_of
from polygraft.blobs.errors import BlobError
from polygraft_adapters.config import CONFIG_NAME
from polygraft_adapters.folder import WEIGHTS_NAME

_STAGED = "staged-"


class BlobStore:
    """Files below files/; adapters below adapters/, each a PEFT folder with a manifest; below staging/ what is not
    done yet. All appear whole or not at all. Any number of processes of one machine share the folder.

    An adapter's modification time is when it was last put: a put that finds it there renews it, under the same lock
    under which it is deleted, so that nobody is told that an adapter is stored while it is being deleted.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    # files

    def put_bytes(self, content: bytes) -> str:
        """Store `content`; its digest, "sha256:<hex>". A damaged copy is replaced."""
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        target = self._file(digest)
        if not (target.is_file() and sha256_of(target) == hex_of(digest)):
            with self._staging() as staging:
                (staging / "file").write_bytes(content)
                self._adopt_file(staging / "file", digest)
        return digest

    def has(self, digest: str) -> bool:
        """Whether a file of this digest is here."""
        return self._file(digest).is_file()

    def path(self, digest: str) -> Path:
        """Where the file lies. Raises BlobError if it is not here, or not what its digest says."""
        path = self._file(digest)
        if not path.is_file():
            raise BlobError(f"the blob store {self.root} has no file {digest}")
        if sha256_of(path) != hex_of(digest):
            raise BlobError(f"the file {digest} is damaged where it is stored")
        return path

    # adapters

    def put_adapter(self, folder: Path, digest: str) -> Path:
        """Store a copy of a PEFT folder's config and weights under its digest, for which the caller vouches. Where it
        lies. A damaged copy is replaced.
        """
        target = self._adapter(digest)
        if self._intact(digest) and self._renew(target):
            return target
        with self._staged_copy(folder) as (staged, _):
            self._adopt_adapter(staged, digest)
        return target

    def adapter_path(self, digest: str) -> Path:
        """The adapter's folder, with its files' sizes compared. Raises BlobError if it is not here or not whole.

        Whoever reads all of it anyway compares the contents' digest; `verified_adapter` says what is wrong if it
        differs.
        """
        path = self._adapter(digest)
        if not path.is_dir():
            raise BlobError(f"the blob store has no adapter {digest}")
        manifest_of(path, digest).check_sizes(path, digest)
        return path

    def verified_adapter(self, digest: str) -> Path:
        """The adapter's folder, with its files' checksums compared. Raises BlobError that names a damaged file."""
        path = self.adapter_path(digest)
        manifest_of(path, digest).check(path, digest)
        return path

    def adapters(self) -> dict[str, float]:
        """The digest of every adapter here, and when it was last put, in Unix seconds."""
        found: dict[str, float] = {}
        # Before the first is put there is no folder; of what is listed, each may go before it is looked at.
        with suppress(FileNotFoundError):
            for entry in list(os.scandir(self.root / "adapters")):
                digest = digest_of(entry.name)
                with suppress(FileNotFoundError):
                    if digest is not None:
                        found[digest] = entry.stat().st_mtime
        return found

    def delete_adapter(self, digest: str, idle: float = 0.0) -> bool:
        """Delete the adapter unless it was put less than `idle` seconds ago. Whether it was here and is gone."""
        target = self._adapter(digest)
        with self._staging() as staging:
            with self._lock():
                try:
                    if time.time() - target.stat().st_mtime < idle:
                        return False
                    target.rename(staging / "deleted")
                except FileNotFoundError:
                    return False
            return True

    # what is not done yet

    def staging_folder(self) -> Path:
        """A fresh folder on the same file system. Whoever asked for it removes it; `sweep` does it for the dead, as
        long as it has the name that it was given.
        """
        staging = self.root / "staging"
        staging.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(dir=staging, prefix=_STAGED))

    def sweep(self, age: float) -> int:
        """Remove what was left in the staging folder and not written to for `age` seconds. How much that was."""
        staging = self.root / "staging"
        if not staging.is_dir():
            return 0
        left = [entry for entry in staging.glob(f"{_STAGED}*") if time.time() - _last_written(entry) > age]
        for entry in left:
            shutil.rmtree(entry, ignore_errors=True)
        return len(left)

    # for this store and the one that keeps copies in it

    def _file(self, digest: str) -> Path:
        return self.root / "files" / hex_of(digest)

    def _adapter(self, digest: str) -> Path:
        return self.root / "adapters" / hex_of(digest)

    def _intact(self, digest: str) -> bool:
        try:
            self._checked(digest)
        except (BlobError, FileNotFoundError):
            return False
        return True

    def _checked(self, digest: str) -> None:
        path = self._adapter(digest)
        manifest_of(path, digest).check(path, digest)

    def _renew(self, target: Path) -> bool:
        """Note that it was put, or used, now. False if it has just gone."""
        with self._lock():
            try:
                os.utime(target)
            except FileNotFoundError:
                return False
            return True

    @contextmanager
    def _staging(self) -> Iterator[Path]:
        folder = self.staging_folder()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def _staged_copy(self, folder: Path) -> Iterator[tuple[Path, Manifest]]:
        """A copy of an adapter's files with their manifest, which is taken of the copy."""
        with self._staging() as staging:
            staged = staging / "adapter"
            staged.mkdir()
            for name in (CONFIG_NAME, WEIGHTS_NAME):
                shutil.copyfile(folder / name, staged / name)
            manifest = Manifest.of(staged)
            (staged / MANIFEST_NAME).write_bytes(manifest.encode())
            yield staged, manifest

    def _adopt_file(self, staged: Path, digest: str) -> Path:
        target = self._file(digest)
        target.parent.mkdir(parents=True, exist_ok=True)
        _flush(staged)
        staged.replace(target)
        _flush(target.parent)
        return target

    def _adopt_adapter(self, staged: Path, digest: str) -> Path:
        """Flush to disk, then rename into place. Whoever comes second finds it there; a damaged one makes room.

        What is there is compared before the lock is taken, which all wait for, and again if it was replaced meanwhile.
        """
        target = self._adapter(digest)
        target.parent.mkdir(parents=True, exist_ok=True)
        for path in (*staged.iterdir(), staged):
            _flush(path)
        while True:
            compared = _files(target)
            intact = compared is not None and self._intact(digest)
            with self._lock():
                if _files(target) != compared:
                    continue
                if not intact:
                    if compared is not None:
                        target.rename(staged.parent / "damaged")
                    staged.rename(target)
                os.utime(target)
                _flush(target.parent)
                return target

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """One at a time, of all processes and threads; released when its holder dies."""
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / "lock").open("ab") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            yield


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _files(folder: Path) -> dict[str, tuple[int, int, int]] | None:
    """What tells the folder's files from any that replace them, which their names and sizes do not; None if there is
    no folder. That it was put again does not show.
    """
    try:
        found = {entry.name: entry.stat() for entry in os.scandir(folder)}
    except FileNotFoundError:
        return None
    return {name: (stat.st_ino, stat.st_mtime_ns, stat.st_size) for name, stat in found.items()}


def _last_written(entry: Path) -> float:
    """When anything in the folder changed; now, for what changes while it is looked at."""
    try:
        return max(path.lstat().st_mtime for path in (entry, *entry.rglob("*")))
    except FileNotFoundError:
        return time.time()
