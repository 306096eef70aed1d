"""Content-addressed files and adapters in one folder that gateways and workers share. Torch-free.

A digest names its content for ever: nothing is written twice, and nothing is changed.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from pathlib import Path

from polygraft.errors import PolygraftError
from polygraft_adapters.config import CONFIG_NAME
from polygraft_adapters.folder import WEIGHTS_NAME

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class BlobError(PolygraftError):
    """A digest that is none, or of which the store holds nothing."""


class BlobStore:
    """Files under files/, adapters as PEFT folders under adapters/; both appear whole or not at all."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def put_bytes(self, content: bytes) -> str:
        """Store `content`; its digest, "sha256:<hex>"."""
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        if not self.has(digest):
            staged = self._staging() / "file"
            staged.write_bytes(content)
            self._publish(staged, self._file(digest))
        return digest

    def has(self, digest: str) -> bool:
        """Whether a file of this digest is here."""
        return self._file(digest).is_file()

    def path(self, digest: str) -> Path:
        """Where the file lies. Raises BlobError if it is not here."""
        path = self._file(digest)
        if not path.is_file():
            raise BlobError(f"the blob store {self.root} has no file {digest}")
        return path

    def put_adapter(self, folder: Path, digest: str) -> Path:
        """Store a copy of a PEFT folder's config and weights under its digest, for which the caller vouches."""
        target = self._adapter(digest)
        if not target.is_dir():
            staged = self._staging() / "adapter"
            staged.mkdir()
            for name in (CONFIG_NAME, WEIGHTS_NAME):
                shutil.copyfile(folder / name, staged / name)
            self._publish(staged, target)
        return target

    def adapter_path(self, digest: str) -> Path:
        """The adapter's folder. Raises BlobError if it is not here."""
        path = self._adapter(digest)
        if not path.is_dir():
            raise BlobError(f"the blob store {self.root} has no adapter {digest}")
        return path

    def _file(self, digest: str) -> Path:
        return self.root / "files" / _hex(digest)

    def _adapter(self, digest: str) -> Path:
        return self.root / "adapters" / _hex(digest)

    def _staging(self) -> Path:
        """A new folder on the same file system, so that a rename is all that remains to be done."""
        staging = self.root / "staging"
        staging.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(dir=staging))

    def _publish(self, staged: Path, target: Path) -> None:
        """Flush to disk, then rename into place; whoever comes second finds the same content there already."""
        for path in (staged, *staged.glob("*")):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            staged.rename(target)
        except OSError:
            if not target.exists():
                raise
        finally:
            shutil.rmtree(staged.parent)


def _hex(digest: str) -> str:
    if _DIGEST.fullmatch(digest) is None:
        raise BlobError(f"{digest!r} is no sha256 digest")
    return digest.removeprefix("sha256:")
