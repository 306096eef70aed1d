"""Checking an adapter in full, in a process that cannot take more memory or time than it is given."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import structlog

from polygraft.card import ModelCard
from polygraft.errors import ApiError, unavailable
from polygraft.process import ChildSpec, describe_exit, end, spawn
from polygraft.registry.checker import ASKED, DONE, NOT_STARTED, OUT_OF_MEMORY, CheckRequest, Verdict
from polygraft_adapters.types import AdapterError, AdapterInfo, Problem

log = structlog.get_logger(__name__)

_NICE = 4
"""Somebody waits for it, though not as urgently as for tokens."""
_FULL_SECONDS = 0.01
"""Before it is tried again to send what the socket has no room for."""
_MAX_VERDICT = 4 << 20
_CLOCK = 3
"""Seconds by the clock for each of the processor's."""
_ENVIRONMENT = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH")


@dataclass(frozen=True, slots=True)
class CheckLimits:
    """What checking one adapter may cost."""

    max_bytes: int
    """Of its files, once they are unpacked."""
    memory: int = 2 << 30
    """Bytes of address space; weights are read in pieces, so that an adapter's size does not matter."""
    seconds: float = 10.0
    """Of a processor, for the smallest one."""
    bytes_per_second: int = 20 << 20
    """How fast a large one must be checked at least."""


class Check(Protocol):
    """What `Checkers.validate` does."""

    async def __call__(
        self,
        folder: Path,
        card: ModelCard,
        limits: CheckLimits,
        *,
        archive: Path | None = None,
        converted: Path | None = None,
    ) -> AdapterInfo: ...


class Checkers:
    """Owns the process whose forks check adapters. It is started by the first check, and again after it has died."""

    def __init__(self) -> None:
        self._server: _Server | None = None
        self._starting = asyncio.Lock()

    async def validate(
        self,
        folder: Path,
        card: ModelCard,
        limits: CheckLimits,
        *,
        archive: Path | None = None,
        converted: Path | None = None,
    ) -> AdapterInfo:
        """Check the PEFT folder against the model of `card`; `archive`, if given, is unpacked into the folder first. An
        adapter that MLX wrote is converted into the folder `converted`, and that is what is checked; without it,
        refused.

        Raises AdapterError with everything that is wrong, the limits included, and ApiError 503 when there can be no
        check just now.
        """
        size = await asyncio.to_thread(_size, folder, archive)
        seconds = limits.seconds + size / limits.bytes_per_second
        request = CheckRequest(
            folder=str(folder),
            archive=None if archive is None else str(archive),
            converted=None if converted is None else str(converted),
            modules=card.modules,
            max_rank=card.max_lora_rank,
            max_bytes=limits.max_bytes,
            memory=limits.memory,
            seconds=max(1, round(seconds)),
            clock=_CLOCK * seconds,
        )
        # It has no name, so that nothing of it is left whoever is killed.
        with tempfile.TemporaryFile() as verdict:
            try:
                server = await self._started()
                code = await server.run(msgspec.json.encode(request), verdict.fileno())
            except OSError as error:
                log.error("checker_not_started", error=str(error))
                raise _unavailable() from None
            verdict.seek(0)
            return read_verdict(code, verdict.read(_MAX_VERDICT))

    async def close(self) -> None:
        """End the process, and with it what it checks."""
        async with self._starting:
            if self._server is not None:
                await self._server.close()
                self._server = None

    async def _started(self) -> _Server:
        async with self._starting:
            if self._server is not None and self._server.dead:
                await self._server.close()
                self._server = None
            if self._server is None:
                self._server = await _Server.start()
            return self._server


class _Server:
    """One such process, over the socket that leads there."""

    def __init__(self, process: asyncio.subprocess.Process, link: socket.socket) -> None:
        self._process = process
        self._link = link
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[int]] = {}
        self._sending = asyncio.Lock()
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def start(cls) -> _Server:
        """Raises OSError."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            try:
                process = await spawn(_command(theirs.fileno()))
            except BaseException:
                ours.close()
                raise
        return cls(process, ours)

    @property
    def dead(self) -> bool:
        """Whether it answers no more."""
        return self._listening.done()

    async def run(self, request: bytes, out: int) -> int:
        """The exit code of the fork that answers the request. Raises OSError, ApiError 503 when the process dies."""
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            async with self._sending:
                await self._send(ASKED.pack(number, len(request)) + request, out)
            return await self._waiting[number]
        finally:
            del self._waiting[number]

    async def close(self) -> None:
        """End it."""
        self._listening.cancel()
        await asyncio.gather(self._listening, return_exceptions=True)
        await end(self._process, 0.0)

    async def _send(self, message: bytes, out: int) -> None:
        """All of it; the file goes along with the first bytes."""
        while True:
            try:
                sent = socket.send_fds(self._link, [message], [out])
                break
            except BlockingIOError:
                await asyncio.sleep(_FULL_SECONDS)
        try:
            if sent < len(message):
                await asyncio.get_running_loop().sock_sendall(self._link, message[sent:])
        except BaseException:
            # What is sent next would be taken for the rest of this.
            self._listening.cancel()
            raise

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        received = b""
        try:
            with contextlib.suppress(ConnectionError):
                while part := await loop.sock_recv(self._link, 4096):
                    received += part
                    whole = len(received) // DONE.size * DONE.size
                    for number, code in DONE.iter_unpack(received[:whole]):
                        if (waiting := self._waiting.get(number)) is not None and not waiting.done():
                            waiting.set_result(code)
                    received = received[whole:]
        finally:
            self._link.close()
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(_unavailable())


def _command(link: int) -> ChildSpec:
    # One thread each: pools of them would count against the address space, and nothing here computes in parallel.
    single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    # The server's secrets are no business of a process that reads what strangers send.
    kept = {name: value for name, value in os.environ.items() if name in _ENVIRONMENT}
    return ChildSpec(
        "checker",
        (sys.executable, "-P", "-m", "polygraft.registry.checker", str(link)),
        env=kept | single,
        pass_fds=(link,),
        nice=_NICE,
    )


def _size(folder: Path, archive: Path | None) -> int:
    """Bytes of what is to be checked."""
    return sum(file.stat().st_size for file in (folder.iterdir() if archive is None else (archive,)))


def read_verdict(code: int, verdict: bytes) -> AdapterInfo:
    """What a check came to that ended with the exit code. Raises as `Checkers.validate` does."""
    if code == NOT_STARTED:
        raise _unavailable()
    if code == OUT_OF_MEMORY:
        raise _over("memory")
    if code in (-signal.SIGXCPU, -signal.SIGALRM):
        raise _over("time")
    if code == -signal.SIGKILL:
        raise _over("time or memory")
    if code != 0:
        # What it died of, it has written to this process's own stderr.
        log.error("checker_failed", exit=describe_exit(code))
        raise AdapterError([Problem("adapter", "cannot be read", "save it again with PEFT and upload it again")])
    found = msgspec.json.decode(verdict, type=Verdict)
    if found.info is None:
        raise AdapterError(found.problems)
    return found.info


def _unavailable() -> ApiError:
    return unavailable("The adapter cannot be checked just now.", retry_after=5)


def _over(what: str) -> AdapterError:
    hint = "save it again with PEFT; an adapter's tensors are few and its config is small"
    return AdapterError([Problem("adapter", f"takes more {what} to check than any adapter should", hint)])
