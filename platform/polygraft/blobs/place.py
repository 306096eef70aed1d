"""What --blob-store says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from polygraft.blobs.bucket import BucketStore
from polygraft.blobs.folder import BlobStore
from polygraft.blobs.objects import Objects
from polygraft.errors import ConfigError


@dataclass(frozen=True, slots=True)
class BlobPlace:
    """Where blobs are kept: in a folder, or in a bucket of which the folder holds copies."""

    folder: Path
    bucket: str | None = None
    """s3://bucket/prefix"""

    def open(self) -> BlobStore:
        """The store. Raises ConfigError for a bucket's URL that cannot be used; connects at first use."""
        return BlobStore(self.folder) if self.bucket is None else BucketStore(Objects(self.bucket), self.folder)


def blob_place(url: str | None, data_dir: Path) -> BlobPlace:
    """What `url` says: a folder, file:///folder or s3://bucket/prefix; None: a folder in the data folder.

    Raises ConfigError for anything else.
    """
    if url is None:
        return BlobPlace(data_dir / "blobs")
    scheme, separator, rest = url.partition("://")
    if not separator:
        return BlobPlace(Path(url).expanduser())
    if scheme == "file" and rest.startswith("/"):
        return BlobPlace(Path(rest))
    if scheme == "s3" and rest.partition("/")[0]:
        return BlobPlace(data_dir / "blob-cache", url)
    raise ConfigError(f"--blob-store {url}: write a folder, file:///folder or s3://bucket/prefix")
