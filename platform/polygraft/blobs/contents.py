"""What a blob is made of, and how its bytes are known to be the right ones."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from polygraft.blobs.errors import BlobError
from polygraft_adapters.config import CONFIG_NAME
from polygraft_adapters.folder import WEIGHTS_NAME

MANIFEST_NAME = "manifest.json"

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def hex_of(digest: str) -> str:
    """The digits of a digest. Raises BlobError for what is none: a digest becomes a file's name."""
    if _DIGEST.fullmatch(digest) is None:
        raise BlobError(f"{digest!r} is no sha256 digest")
    return digest.removeprefix("sha256:")


def digest_of(name: str) -> str | None:
    """The digest whose digits are a file's name; None for a name that is none of ours."""
    digest = f"sha256:{name}"
    return digest if _DIGEST.fullmatch(digest) else None


def sha256_of(path: Path) -> str:
    """Of a file's bytes, in hex, read in pieces."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


class FileSum(msgspec.Struct, frozen=True):
    """What a file must be."""

    sha256: str
    """In hex."""
    size: int
    """In bytes."""

    @classmethod
    def of(cls, path: Path) -> FileSum:
        """What the file is."""
        return cls(sha256_of(path), path.stat().st_size)


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sums of an adapter's two files, which lie beside it. An adapter without one is not all there."""

    config: FileSum
    weights: FileSum

    @classmethod
    def of(cls, folder: Path) -> Manifest:
        """What the folder's files are."""
        return cls(FileSum.of(folder / CONFIG_NAME), FileSum.of(folder / WEIGHTS_NAME))

    @classmethod
    def decode(cls, encoded: bytes, digest: str) -> Manifest:
        """Raises BlobError for what is no manifest."""
        try:
            return msgspec.json.decode(encoded, type=cls)
        except msgspec.DecodeError:
            raise damaged(digest, MANIFEST_NAME) from None

    def encode(self) -> bytes:
        """As JSON."""
        return msgspec.json.encode(self)

    @property
    def sums(self) -> tuple[tuple[str, FileSum], ...]:
        """Each file's name and sum."""
        return (CONFIG_NAME, self.config), (WEIGHTS_NAME, self.weights)

    def misfit(self, sizes: Mapping[str, int]) -> str | None:
        """The first file that is not among these, by name, with its size; None if all are."""
        return next((name for name, expected in self.sums if sizes.get(name) != expected.size), None)

    def check_sizes(self, folder: Path, digest: str) -> None:
        """Raises BlobError if a file is not there or has another size, which costs no reading."""
        sizes = {entry.name: entry.stat().st_size for entry in os.scandir(folder)}
        if (name := self.misfit(sizes)) is not None:
            raise damaged(digest, name)

    def check(self, folder: Path, digest: str) -> None:
        """Raises BlobError if a file is not, byte by byte, what was stored."""
        self.check_sizes(folder, digest)
        for name, expected in self.sums:
            if sha256_of(folder / name) != expected.sha256:
                raise damaged(digest, name)


def manifest_of(folder: Path, digest: str) -> Manifest:
    """The manifest in the folder. Raises BlobError if there is none that can be read."""
    try:
        encoded = (folder / MANIFEST_NAME).read_bytes()
    except FileNotFoundError:
        raise damaged(digest, MANIFEST_NAME) from None
    return Manifest.decode(encoded, digest)


def damaged(digest: str, name: str) -> BlobError:
    return BlobError(f"the adapter {digest} is damaged where it is stored: {name} is not what was put there")
