"""Adapters on the Hugging Face Hub and in S3-compatible buckets, fetched file by file."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

import httpx
import obstore
import structlog
from huggingface_hub import HfApi, constants, get_token, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
from obstore.exceptions import BaseError, NotFoundError
from obstore.store import S3Store

from polygraft.registry.uploads.contents import choose
from polygraft.registry.uploads.staging import LOOK_BYTES, RequireRoom, refusing_when_full
from polygraft_adapters.types import AdapterError, Problem

log = structlog.get_logger(__name__)

FETCH_SECONDS = 3600.0
_TIMEOUT = httpx.Timeout(30.0)
MOST_FILES = 1000
"""That a folder or a prefix may hold which is an adapter's."""
_PIECE = 1 << 20


class _Chunk(Protocol):
    def __len__(self) -> int: ...


@dataclass(frozen=True, slots=True)
class HubSource:
    """A repository of the Hub, with the operator's own token if there is one in the environment."""

    repo: str
    revision: str
    max_bytes: int
    room: RequireRoom

    async def fetch(self, folder: Path) -> None:
        """See Source."""
        where = f"hf://{self.repo}@{self.revision}"
        if constants.HF_HUB_OFFLINE:
            hint = "upload the adapter's files instead"
            raise AdapterError([Problem("source", f"{where}: this server works offline (HF_HUB_OFFLINE)", hint)])
        try:
            async with asyncio.timeout(FETCH_SECONDS):
                await self._download(folder)
        except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, httpx.HTTPError, OSError) as error:
            raise _unreachable(where, error) from error

    async def _download(self, folder: Path) -> None:
        names = await asyncio.to_thread(HfApi().list_repo_files, self.repo, revision=self.revision)
        allowance = _Allowance(self.max_bytes, self.room)
        token = get_token()
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        async with httpx.AsyncClient(timeout=_TIMEOUT, follow_redirects=True, headers=headers) as client:
            for name, path in choose(names).items():
                url = hf_hub_url(self.repo, path, revision=self.revision)
                async with client.stream("GET", url) as answer:
                    answer.raise_for_status()
                    await _save(answer.aiter_bytes(_PIECE), folder / name, allowance)


@dataclass(frozen=True, slots=True)
class BucketSource:
    """Objects below a prefix of a bucket. Endpoint and credentials come from the environment, by AWS's names."""

    bucket: str
    prefix: str
    max_bytes: int
    room: RequireRoom

    async def fetch(self, folder: Path) -> None:
        """See Source."""
        where = f"s3://{self.bucket}/{self.prefix}"
        try:
            async with asyncio.timeout(FETCH_SECONDS):
                await self._download(folder)
        except NotFoundError as error:
            raise AdapterError([Problem("source", f"{where}: there is no such object")]) from error
        except (BaseError, OSError, ValueError) as error:
            raise _unreachable(where, error) from error

    async def _download(self, folder: Path) -> None:
        store = S3Store.from_url(f"s3://{self.bucket}")
        under = f"{self.prefix}/" if self.prefix else ""
        paths: list[str] = []
        async for page in obstore.list(store, self.prefix or None, chunk_size=MOST_FILES):
            paths.extend(found["path"].removeprefix(under) for found in page)
            if len(paths) > MOST_FILES:
                raise too_many("objects")
        allowance = _Allowance(self.max_bytes, self.room)
        for name, path in choose(paths).items():
            answer = await obstore.get_async(store, under + path)
            await _save(answer.stream(min_chunk_size=_PIECE), folder / name, allowance)


class _Allowance:
    """How many bytes may still come, by what an adapter may have and by the room that is left."""

    def __init__(self, max_bytes: int, room: RequireRoom) -> None:
        self._max_bytes = max_bytes
        self._room = room
        self._spent = 0
        self._next_look = 0

    async def spend(self, count: int) -> None:
        self._spent += count
        if self._spent > self._max_bytes:
            raise too_much(self._max_bytes)
        if self._spent > self._next_look:
            await self._room(count)
            self._next_look = self._spent + LOOK_BYTES


async def _save(chunks: AsyncIterator[_Chunk], to: Path, allowance: _Allowance) -> None:
    file: IO[bytes]
    with await asyncio.to_thread(to.open, "xb") as file:
        async for chunk in chunks:
            await allowance.spend(len(chunk))
            with refusing_when_full():
                await asyncio.to_thread(file.write, chunk)  # type: ignore[arg-type]  # both libraries yield buffers


def too_much(max_bytes: int) -> AdapterError:
    """An adapter that is larger than this server takes."""
    return AdapterError([Problem("source", f"has more than {max_bytes} bytes", "ask for a larger --max-adapter-size")])


def too_many(what: str) -> AdapterError:
    """A place that is no adapter's folder."""
    return AdapterError([Problem("source", f"has more than {MOST_FILES} {what}", "name the adapter's own folder")])


def _unreachable(where: str, error: Exception) -> AdapterError:
    # What a library says may tell of the server's network: that is for the log.
    answer = error.response if isinstance(error, httpx.HTTPStatusError | HfHubHTTPError) else None
    status = None if answer is None else answer.status_code
    # Such an error repeats the address, which after a redirection is a signed one: as good as a password.
    said = str(error) if answer is None else f"{answer.status_code} from {answer.request.url.host}"
    log.warning("import_failed", source=where, kind=type(error).__name__, error=said)
    if status in (401, 403, 404):
        problem = "does not exist, or this server may not read it"
    else:
        problem = "cannot be read just now"
    return AdapterError([Problem("source", f"{where}: {problem}", "check the name, and try again later")])
