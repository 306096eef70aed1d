"""Where adapters may be imported from. Nothing is, unless the operator's options allow it."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from polygraft.errors import ApiError, bad_request, shortened
from polygraft.registry.roots import adapter_roots, below_roots
from polygraft.registry.uploads.contents import choose
from polygraft.registry.uploads.remote import MOST_FILES, BucketSource, HubSource, too_many, too_much
from polygraft.registry.uploads.staging import RequireRoom, refusing_when_full
from polygraft_adapters.types import AdapterError, Problem

_HUB = re.compile(r"hf://(?P<repo>[\w.-]{1,96}/[\w.-]{1,96})(?:@(?P<revision>[\w./-]{1,255}))?", re.ASCII)
_BUCKET = re.compile(r"s3://(?P<bucket>[a-z0-9][a-z0-9.-]{1,62})/(?P<prefix>[\w./ +=@()'!*-]{0,1000})", re.ASCII)


class Source(Protocol):
    """One place that holds an adapter."""

    async def fetch(self, folder: Path) -> None:
        """Bring the adapter's files into `folder`. Raises AdapterError, and ApiError 503 where there is no room."""


class Sources:
    """Says which places are allowed."""

    def __init__(self, roots: Sequence[str], allowed: Sequence[str], max_bytes: int, room: RequireRoom) -> None:
        """`roots` are folders for file://, `allowed` the beginnings of hf:// and s3:// URLs."""
        self._roots = adapter_roots(roots)
        self._allowed = tuple(allowed)
        self._max_bytes = max_bytes
        self._room = room

    async def admit(self, source: str) -> Source:
        """The place that is meant. Raises ApiError: 400 for what is none, 403 for what is not allowed; of folders it
        says no more than that.
        """
        if source.startswith("file://"):
            return await asyncio.to_thread(self._folder, source)
        if match := _HUB.fullmatch(source):
            self._require(source)
            if "." in (match["repo"].partition("/")[0], match["repo"].partition("/")[2]):
                raise _no_source()
            revision = "main" if match["revision"] is None else match["revision"]
            return HubSource(match["repo"], revision, self._max_bytes, self._room)
        if match := _BUCKET.fullmatch(source):
            self._require(source)
            return BucketSource(match["bucket"], match["prefix"].rstrip("/"), self._max_bytes, self._room)
        raise _no_source()

    def _require(self, source: str) -> None:
        parts = source.replace("@", "/").split("/")
        if ".." in parts or not any(_below(source, allowed) for allowed in self._allowed):
            raise ApiError(
                403,
                f"`source` {shortened(source)!r} is not among those that the server's --import-source allows.",
                type="permission_error",
                param="source",
                code="source_not_allowed",
            )

    def _folder(self, source: str) -> FolderSource:
        url = urlsplit(source)
        if url.netloc not in ("", "localhost") or url.query or url.fragment or not url.path.startswith("/"):
            raise _no_source()
        path = below_roots(unquote(url.path), self._roots, param="source")
        return FolderSource(path, self._roots, self._max_bytes, self._room)


@dataclass(frozen=True, slots=True)
class FolderSource:
    """A folder of this machine."""

    path: Path
    roots: tuple[Path, ...]
    max_bytes: int
    room: RequireRoom

    async def fetch(self, folder: Path) -> None:
        """See Source."""
        try:
            files = await asyncio.to_thread(self._files)
            for name, (path, size) in files.items():
                await self.room(size)
                with refusing_when_full():
                    await asyncio.to_thread(shutil.copyfile, path, folder / name)
        except NotADirectoryError as error:
            what = "is a file; an adapter is a folder with adapter_config.json and adapter_model.safetensors"
            raise AdapterError([Problem("source", what, "name the folder; an archive is to be uploaded")]) from error
        except OSError as error:
            raise AdapterError([Problem("source", f"cannot be read: {error.strerror}")]) from error

    def _files(self) -> dict[str, tuple[Path, int]]:
        """Where the adapter's files lie, and their sizes in bytes, by the names that they get."""
        names = [f"{entry.name}/" if entry.is_dir() else entry.name for entry in os.scandir(self.path)]
        if len(names) > MOST_FILES:
            raise too_many("files")
        files = {}
        for name, found in choose(names).items():
            # Links are followed, so that a Hub cache can be served, but never out of the roots.
            path = self._below_roots(found)
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                raise AdapterError([Problem(name, "is no regular file")])
            files[name] = path, status.st_size
        if sum(size for _, size in files.values()) > self.max_bytes:
            raise too_much(self.max_bytes)
        return files

    def _below_roots(self, name: str) -> Path:
        try:
            return below_roots(str(self.path / name), self.roots, param="source")
        except ApiError as error:
            raise AdapterError([Problem("source", "has a link that leads out of the --adapter-root")]) from error


def _below(source: str, allowed: str) -> bool:
    """Whether `source` begins with `allowed`, up to the end of a part of either."""
    if not source.startswith(allowed):
        return False
    return allowed.endswith(("/", "@")) or source[len(allowed) : len(allowed) + 1] in ("", "/", "@")


def _no_source() -> ApiError:
    return bad_request("`source` must be hf://org/repo@rev, s3://bucket/prefix or file:///path.", param="source")
