"""An S3-compatible bucket, as the few calls that are made of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from polygraft.blobs.errors import BlobUnavailable
from polygraft.errors import ConfigError

_PIECE = 8 << 20
"""Bytes asked for at once, each with a timeout of its own: the largest file needs no longer timeout than the least."""
_RETRIES = 4
_RETRY_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Stored:
    """An object as a listing tells of it."""

    key: str
    size: int
    stored_at: float
    """Unix seconds, by the store's clock."""


class Objects:
    """Objects below s3://bucket/prefix. Endpoint, region and credentials come from the environment, by AWS's names.

    Blocking, from any thread. Calls are repeated a few times; all raise BlobUnavailable where no answer comes.
    """

    def __init__(self, url: str) -> None:
        """Raises ConfigError for a URL that names no bucket. Connects at first use."""
        self.url = url
        try:
            self._store = S3Store.from_url(
                url, retry_config={"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=_RETRY_SECONDS)}
            )
        except (BaseError, ValueError) as error:
            raise ConfigError(f"--blob-store {url} cannot be used: {_first_line(error)}") from error

    def put(self, key: str, source: Path | bytes) -> None:
        """Store a file or bytes; seen whole or not at all."""
        with self._answering():
            obstore.put(self._store, key, source)

    def read(self, key: str) -> bytes | None:
        """A small object's bytes; None if there is none."""
        try:
            with self._answering(missing_is_an_answer=True):
                return bytes(obstore.get(self._store, key).bytes())
        except FileNotFoundError:
            return None

    def exists(self, key: str) -> bool:
        """Whether there is such an object."""
        try:
            with self._answering(missing_is_an_answer=True):
                obstore.head(self._store, key)
        except FileNotFoundError:
            return False
        return True

    def download(self, key: str, target: Path, size: int) -> bool:
        """Write the object's first `size` bytes to a new file. False if there is no such object."""
        try:
            with target.open("xb") as stream, self._answering(missing_is_an_answer=True):
                for start in range(0, size, _PIECE):
                    end = min(start + _PIECE, size)
                    stream.write(obstore.get_range(self._store, key, start=start, end=end))
        except FileNotFoundError:
            return False
        return True

    def copy(self, source: str, target: str) -> bool:
        """Copy within the store. False if there is no `source`."""
        try:
            with self._answering(missing_is_an_answer=True):
                obstore.copy(self._store, source, target)
        except FileNotFoundError:
            return False
        return True

    def list(self, prefix: str) -> list[Stored]:
        """Everything below the folder `prefix`."""
        with self._answering():
            pages = obstore.list(self._store, prefix)
            return [
                Stored(meta["path"], meta["size"], meta["last_modified"].timestamp()) for page in pages for meta in page
            ]

    def delete(self, keys: Sequence[str]) -> None:
        """Delete them; those that are not there are no error."""
        if keys:
            with self._answering():
                obstore.delete(self._store, list(keys))

    @contextmanager
    def _answering(self, *, missing_is_an_answer: bool = False) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            if missing_is_an_answer and "NoSuchBucket" not in str(error):
                raise
            raise self._unavailable(error) from error
        except BaseError as error:
            raise self._unavailable(error) from error

    def _unavailable(self, error: Exception) -> BlobUnavailable:
        return BlobUnavailable(f"the blob store {self.url} does not answer: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    """Without the pages of debug output that follow it."""
    return str(error).partition("\n")[0].strip()
