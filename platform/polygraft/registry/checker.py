"""`python -m polygraft.registry.checker FD`: opens and checks adapters, each in a process of its own.

Everything is imported once; a request that comes over the socket FD is then answered by a fork of that, which takes
milliseconds, keeps to the limits that the request tells, and writes its verdict to the open file that came along.
Torch-free. What a hostile adapter can do at most is to end the fork.
"""

from __future__ import annotations

import os
import resource
import select
import shutil
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from polygraft.process import die_with_parent
from polygraft.registry.uploads.advice import advise
from polygraft.registry.uploads.archives import unpack
from polygraft_adapters.inspection import inspect_adapter
from polygraft_adapters.mlx import convert, is_mlx
from polygraft_adapters.types import AdapterError, AdapterInfo, ModuleShapes, Problem

ASKED = struct.Struct("<QI")
"""Before a request: its number, and how many bytes of JSON follow. A file to write to comes along."""
DONE = struct.Struct("<Qi")
"""The answer: the number and the exit code, which is that of `subprocess`."""
OUT_OF_MEMORY = 12
"""Exit code for what the memory limit did not allow."""
NOT_STARTED = 71
"""Exit code of a process that could not be made."""
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
    clock: float
    """Seconds by the clock, after which it is over as well."""


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


def serve(link: socket.socket) -> None:
    """Answer requests, several at once, until the other end closes."""
    running: dict[int, int] = {}
    woken, waker = socket.socketpair()
    for end in (woken, waker):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker.fileno())
    while True:
        ready, _, _ = select.select([link, woken], [], [])
        if woken in ready:
            woken.recv(4096)
            for pid, code in _ended():
                link.sendall(DONE.pack(running.pop(pid), code))
        if link in ready:
            head, files, _, _ = socket.recv_fds(link, ASKED.size, 1)
            if not head:
                return
            number, size = ASKED.unpack(head)
            asked = link.recv(size, socket.MSG_WAITALL)
            try:
                pid = os.fork()
            except OSError:
                link.sendall(DONE.pack(number, NOT_STARTED))
            else:
                if pid == 0:
                    link.close()
                    os._exit(_answer(asked, files[0]))
                running[pid] = number
            os.close(files[0])


def _ended() -> Iterator[tuple[int, int]]:
    """The children that are no more, with their exit codes."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, os.waitstatus_to_exitcode(status)


def _answer(asked: bytes, out: int) -> int:
    """Runs in the fork. Its exit code."""
    parent = os.getppid()
    die_with_parent()
    if os.getppid() != parent:
        return 1
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        request = msgspec.json.decode(asked, type=CheckRequest)
        _limit(request)
        verdict = msgspec.json.encode(check(request))
        with os.fdopen(out, "wb") as file:
            file.write(verdict)
    except MemoryError:
        return OUT_OF_MEMORY
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def _limit(request: CheckRequest) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (request.memory, request.memory))
    resource.setrlimit(resource.RLIMIT_CPU, (request.seconds, request.seconds + 1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (request.max_bytes + 1, request.max_bytes + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_REAL, request.clock)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
