"""The blob store in a bucket, with copies of what this machine uses in a folder."""

from __future__ import annotations

import os
import secrets
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from polygraft.blobs.contents import MANIFEST_NAME, Manifest, damaged, digest_of, hex_of, sha256_of
from polygraft.blobs.errors import BlobError, BlobUnavailable
from polygraft.blobs.folder import BlobStore
from polygraft.blobs.objects import Objects, Stored

CACHE_BYTES = 16 << 30
"""What the copies of adapters may take on disk."""
FRESH_SECONDS = 600.0
"""A put that finds an adapter put this lately leaves it at that. Far less than any `idle` for which it is deleted."""
_IN_USE_SECONDS = 60.0
"""A copy that was asked for this lately is perhaps being read, and stays."""


@dataclass(frozen=True, slots=True)
class _Generation:
    """One upload of an adapter. It is never written to again: a bucket has no lock under which one could be renewed
    while nobody deletes it, so a later put makes the next generation, and only old ones are deleted.
    """

    folder: str
    objects: tuple[Stored, ...]

    @property
    def manifest(self) -> Stored | None:
        """Written last; without it the generation does not count."""
        return next((each for each in self.objects if each.key == f"{self.folder}/{MANIFEST_NAME}"), None)

    @property
    def last_written(self) -> float:
        return max(each.stored_at for each in self.objects)

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes by the name of the file."""
        return {each.key.removeprefix(f"{self.folder}/"): each.size for each in self.objects}

    @property
    def keys(self) -> list[str]:
        """In the order in which they are deleted: the manifest goes first."""
        return sorted((each.key for each in self.objects), key=lambda key: not key.endswith(f"/{MANIFEST_NAME}"))


class BucketStore(BlobStore):
    """Objects files/<hex> and adapters/<hex>/<generation>/<file>. The folder `root` holds copies of bounded size, of
    which the least recently used leave. What is fetched is compared with its checksums.

    Everything may raise BlobUnavailable besides what BlobStore raises.
    """

    def __init__(self, objects: Objects, root: Path, cache_bytes: int = CACHE_BYTES) -> None:
        super().__init__(root)
        self._objects = objects
        self._cache_bytes = cache_bytes

    # files

    def put_bytes(self, content: bytes) -> str:
        digest = super().put_bytes(content)
        if not self.has(digest):
            self._objects.put(_file_key(digest), content)
        return digest

    def has(self, digest: str) -> bool:
        return self._objects.exists(_file_key(digest))

    def path(self, digest: str) -> Path:
        try:
            return super().path(digest)
        except BlobError:
            return self._fetch_file(digest)

    # adapters

    def put_adapter(self, folder: Path, digest: str) -> Path:
        with self._staged_copy(folder) as (staged, manifest):
            newest = _newest(self._generations(digest))
            if newest is not None and manifest.misfit(newest.sizes) is not None:
                newest = None
            if newest is None or time.time() - newest.last_written > FRESH_SECONDS:
                self._store(staged, manifest, digest, newest)
            cached = self._adopt_adapter(staged, digest)
        self._trim()
        return cached

    def adapter_path(self, digest: str) -> Path:
        cached = self._cached(digest)
        return cached if cached is not None else self._fetch_adapter(digest)

    def verified_adapter(self, digest: str) -> Path:
        if not self._intact(digest):
            super().delete_adapter(digest)
        return self.adapter_path(digest)

    def adapters(self) -> dict[str, float]:
        stored = {}
        for digest, generations in _by_digest(self._objects.list("adapters")).items():
            if (newest := _newest(generations)) is not None:
                stored[digest] = newest.last_written
        return stored

    def delete_adapter(self, digest: str, idle: float = 0.0) -> bool:
        generations = self._generations(digest)
        young = [each for each in generations if time.time() - each.last_written < idle]
        for each in generations:
            if each not in young:
                self._objects.delete(each.keys[:1])
                self._objects.delete(each.keys[1:])
        if young or not generations:
            return False
        super().delete_adapter(digest)
        return True

    def sweep(self, age: float) -> int:
        """Also removes uploads that were never done, and generations that have a successor."""
        count = super().sweep(age)
        for generations in _by_digest(self._objects.list("adapters")).values():
            newest = _newest(generations)
            for each in generations:
                if each is not newest and time.time() - each.last_written > age:
                    self._objects.delete(each.keys)
                    count += 1
        return count

    # the bucket

    def _generations(self, digest: str) -> list[_Generation]:
        return _by_digest(self._objects.list(f"adapters/{hex_of(digest)}")).get(digest, [])

    def _store(self, staged: Path, manifest: Manifest, digest: str, old: _Generation | None) -> None:
        """A new generation, copied within the bucket where the old one is the same."""
        folder = f"adapters/{hex_of(digest)}/{time.time_ns():016x}-{secrets.token_hex(4)}"
        same = old is not None and self._objects.read(f"{old.folder}/{MANIFEST_NAME}") == manifest.encode()
        for name, _ in manifest.sums:
            copied = same and old is not None and self._objects.copy(f"{old.folder}/{name}", f"{folder}/{name}")
            if not copied:
                self._objects.put(f"{folder}/{name}", staged / name)
        self._objects.put(f"{folder}/{MANIFEST_NAME}", manifest.encode())

    def _fetch_file(self, digest: str) -> Path:
        content = self._objects.read(_file_key(digest))
        if content is None:
            raise BlobError(f"the blob store {self._objects.url} has no file {digest}")
        with self._staging() as staging:
            (staging / "file").write_bytes(content)
            if sha256_of(staging / "file") != hex_of(digest):
                raise BlobError(f"the file {digest} is damaged where it is stored")
            return self._adopt_file(staging / "file", digest)

    def _fetch_adapter(self, digest: str) -> Path:
        """Twice at most: a new generation may replace the one that is read, and a line may damage bytes."""
        try:
            fetched = self._download(digest)
        except BlobUnavailable:
            raise
        except BlobError:
            fetched = self._download(digest)
        self._trim()
        return fetched

    def _download(self, digest: str) -> Path:
        newest = _newest(self._generations(digest))
        encoded = None if newest is None else self._objects.read(f"{newest.folder}/{MANIFEST_NAME}")
        if newest is None or encoded is None:
            raise BlobError(f"the blob store has no adapter {digest}")
        manifest = Manifest.decode(encoded, digest)
        if (name := manifest.misfit(newest.sizes)) is not None:
            raise damaged(digest, name)
        with self._staging() as staging:
            staged = staging / "adapter"
            staged.mkdir()
            (staged / MANIFEST_NAME).write_bytes(encoded)
            for name, expected in manifest.sums:
                self._objects.download(f"{newest.folder}/{name}", staged / name, expected.size)
            manifest.check(staged, digest)
            return self._adopt_adapter(staged, digest)

    # the copies

    def _cached(self, digest: str) -> Path | None:
        """The copy in the folder, noted as used; None if there is none that looks whole."""
        try:
            copy = super().adapter_path(digest)
        except (BlobError, FileNotFoundError):
            return None
        return copy if self._renew(copy) else None

    def _trim(self) -> None:
        """Let the least recently used copies leave until the rest is within bounds."""
        copies = sorted(super().adapters().items(), key=lambda copy: copy[1])
        sizes = {digest: _size(self._adapter(digest)) for digest, _ in copies}
        total = sum(sizes.values())
        for digest, _ in copies:
            if total <= self._cache_bytes or not super().delete_adapter(digest, _IN_USE_SECONDS):
                break
            total -= sizes[digest]


def _file_key(digest: str) -> str:
    return f"files/{hex_of(digest)}"


def _by_digest(objects: list[Stored]) -> dict[str, list[_Generation]]:
    """The generations of every adapter among the objects; names that are none of ours are passed over."""
    folders: dict[tuple[str, str], list[Stored]] = defaultdict(list)
    for each in objects:
        parts = each.key.split("/")
        if len(parts) == 4:
            folders[parts[1], "/".join(parts[:3])].append(each)
    found: dict[str, list[_Generation]] = defaultdict(list)
    for (name, folder), held in folders.items():
        if (digest := digest_of(name)) is not None:
            found[digest].append(_Generation(folder, tuple(held)))
    return found


def _newest(generations: list[_Generation]) -> _Generation | None:
    whole = [each for each in generations if each.manifest is not None]
    return max(whole, key=lambda each: (each.last_written, each.folder), default=None)


def _size(folder: Path) -> int:
    try:
        return sum(entry.stat().st_size for entry in os.scandir(folder))
    except FileNotFoundError:
        return 0
