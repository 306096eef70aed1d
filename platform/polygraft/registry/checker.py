"""`python -m polygraft.registry.checker REQUEST FD`: opens and checks one adapter in a process of its own.

Keeps to the limits that the request tells, and writes its verdict to the open file FD. Torch-free. What a hostile
adapter can do at most is to end this process.
"""

from __future__ import annotations

import os
import resource
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from polygraft.registry.uploads.advice import advise
from polygraft.registry.uploads.archives import unpack
from polygraft_adapters.inspection import inspect_adapter
from polygraft_adapters.mlx import convert, is_mlx
from polygraft_adapters.types import AdapterError, AdapterInfo, ModuleShapes, Problem

OUT_OF_MEMORY = 12
"""Exit code for what the memory limit did not allow."""
MAX_PROBLEMS = 100


class CheckRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What to check, against what, and what it may cost: bytes of files and of address space, processor seconds."""

    folder: str
    archive: str | None
    """What to unpack into the folder first."""
    converted: str | None
    """Where an adapter that MLX wrote goes as PEFT would have written it; None: it is refused."""
    modules: ModuleShapes
    max_rank: int
    max_bytes: int
    memory: int
    seconds: int


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Either what the adapter is, or all that is wrong with it."""

    info: AdapterInfo | None = None
    problems: tuple[Problem, ...] = ()


def check(request: CheckRequest) -> Verdict:
    """Unpack the archive, if there is one, convert what has to be, and inspect the adapter."""
    folder = Path(request.folder)
    try:
        if request.archive is not None:
            unpack(Path(request.archive), _empty(folder), request.max_bytes)
        if request.converted is None or not is_mlx(folder):
            return Verdict(info=inspect_adapter(folder, request.modules, request.max_rank))
        converted = _empty(Path(request.converted))
        convert(folder, converted)
        return Verdict(info=inspect_adapter(converted, request.modules, request.max_rank))
    except AdapterError as error:
        return Verdict(problems=tuple(advise(folder, _bounded(error.problems))))


def _empty(folder: Path) -> Path:
    """The folder, without what another check left there that was cut off."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def _bounded(problems: Sequence[Problem]) -> tuple[Problem, ...]:
    if len(problems) <= MAX_PROBLEMS:
        return tuple(problems)
    rest = Problem("adapter", f"and {len(problems) - MAX_PROBLEMS} more problems like these")
    return (*problems[:MAX_PROBLEMS], rest)


def _limit(request: CheckRequest) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (request.memory, request.memory))
    resource.setrlimit(resource.RLIMIT_CPU, (request.seconds, request.seconds + 1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (request.max_bytes + 1, request.max_bytes + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> int:
    """The process's exit code."""
    request = msgspec.json.decode(sys.argv[1], type=CheckRequest)
    _limit(request)
    try:
        verdict = msgspec.json.encode(check(request))
    except MemoryError:
        return OUT_OF_MEMORY
    with os.fdopen(int(sys.argv[2]), "wb") as out:
        out.write(verdict)
    return 0


if __name__ == "__main__":
    sys.exit(main())
