"""Child processes that do not outlive their parent."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
KILL_GRACE = 5.0
"""Seconds that a killed process gets to be gone."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to run. `env` is the whole environment, None is this process's own; `log` takes stdout and stderr. `nice` is
    how far it steps back for others that want a processor: 0 (not at all) to 19.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] | None = None
    pass_fds: tuple[int, ...] = ()
    log: Path | None = None
    nice: int = 0


def die_with_parent() -> None:
    """For a child, before it execs: the kernel ends it once the thread that started it is gone, however (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def step_back(nice: int) -> None:
    """Lower the calling process's claim to processors, and that of its children to be."""
    os.nice(nice)
    # With autogroups (sched(7)) that counts within the session only, and sessions among each other have their own.
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(nice))


def _begin(parent: int, nice: int) -> None:
    """Runs in the child before it execs."""
    die_with_parent()
    if nice:
        step_back(nice)
    # The parent may have died between the fork and the line above: then no signal will come.
    if os.getppid() != parent:
        os._exit(1)


async def spawn(spec: ChildSpec) -> asyncio.subprocess.Process:
    """Start the child in a session of its own (Ctrl-C reaches only the parent), ended with the calling process even
    when that is killed (Linux). Call it from the main thread: the kernel watches the thread that forks.
    """
    with ExitStack() as stack:
        output = stack.enter_context(spec.log.open("ab")) if spec.log is not None else None
        return await asyncio.create_subprocess_exec(
            *spec.argv,
            env=spec.env,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=spec.pass_fds,
            start_new_session=True,
            preexec_fn=functools.partial(_begin, os.getpid(), spec.nice),
        )


async def end(process: asyncio.subprocess.Process, grace: float) -> None:
    """SIGTERM, and SIGKILL if the process is still there after `grace` seconds."""
    for name, patience in ((signal.SIGTERM, grace), (signal.SIGKILL, KILL_GRACE)):
        if process.returncode is not None:
            return
        process.send_signal(name)
        try:
            await asyncio.wait_for(process.wait(), patience)
        except TimeoutError:
            continue


def describe_exit(code: int) -> str:
    """`exit code 1`, or the signal's name."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
