"""Checking an adapter in full, in a child process that cannot take more memory or time than it is given."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import structlog

from polygraft.card import ModelCard
from polygraft.errors import unavailable
from polygraft.process import ChildSpec, describe_exit, end, spawn
from polygraft.registry.checker import OUT_OF_MEMORY, CheckRequest, Verdict
from polygraft_adapters.types import AdapterError, AdapterInfo, Problem

log = structlog.get_logger(__name__)

_NICE = 4
"""Somebody waits for it, though not as urgently as for tokens."""
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
    """What `validate` does."""

    async def __call__(
        self,
        folder: Path,
        card: ModelCard,
        limits: CheckLimits,
        *,
        archive: Path | None = None,
        converted: Path | None = None,
    ) -> AdapterInfo: ...


async def validate(
    folder: Path, card: ModelCard, limits: CheckLimits, *, archive: Path | None = None, converted: Path | None = None
) -> AdapterInfo:
    """Check the PEFT folder against the model of `card`; `archive`, if given, is unpacked into the folder first. An
    adapter that MLX wrote is converted into the folder `converted`, and that is what is checked; without it, refused.

    Raises AdapterError with everything that is wrong, the limits included, and ApiError 503 when there can be no check
    just now.
    """
    size = await asyncio.to_thread(_size, folder if archive is None else archive)
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
    )
    # It has no name, so that nothing of it is left whoever is killed.
    with tempfile.TemporaryFile() as verdict:
        try:
            process = await spawn(_child(request, verdict.fileno()))
        except OSError as error:
            log.error("checker_not_started", error=str(error))
            raise unavailable("The adapter cannot be checked just now.", retry_after=5) from None
        try:
            async with asyncio.timeout(_CLOCK * seconds):
                code = await process.wait()
        except TimeoutError:
            raise _over("time") from None
        finally:
            await asyncio.shield(end(process, 0.0))
        verdict.seek(0)
        return _read(code, verdict.read(_MAX_VERDICT))


def _child(request: CheckRequest, verdict: int) -> ChildSpec:
    # One thread each: pools of them would count against the address space, and nothing here computes in parallel.
    single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    # The server's secrets are no business of a process that reads what strangers send.
    kept = {name: value for name, value in os.environ.items() if name in _ENVIRONMENT}
    asked = msgspec.json.encode(request).decode()
    return ChildSpec(
        "checker",
        (sys.executable, "-P", "-m", "polygraft.registry.checker", asked, str(verdict)),
        env=kept | single,
        pass_fds=(verdict,),
        nice=_NICE,
    )


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else sum(file.stat().st_size for file in path.iterdir())


def _read(code: int, verdict: bytes) -> AdapterInfo:
    if code == OUT_OF_MEMORY:
        raise _over("memory")
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        raise _over("time or memory")
    if code != 0:
        # What it died of, it has written to this process's own stderr.
        log.error("checker_failed", exit=describe_exit(code))
        raise AdapterError([Problem("adapter", "cannot be read", "save it again with PEFT and upload it again")])
    found = msgspec.json.decode(verdict, type=Verdict)
    if found.info is None:
        raise AdapterError(found.problems)
    return found.info


def _over(what: str) -> AdapterError:
    hint = "save it again with PEFT; an adapter's tensors are few and its config is small"
    return AdapterError([Problem("adapter", f"takes more {what} to check than any adapter should", hint)])
