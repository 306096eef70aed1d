"""Servers and measuring programs, each started and ended here, each with a log of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from .errors import PeerError, tail

START_SECONDS = 1200.0
STOP_SECONDS = 60.0
OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True, slots=True)
class Server:
    """How one is started: `command` may name the port as {port}; the path `ready` answers 200 once it serves."""

    name: str
    command: tuple[str, ...]
    ready: str
    variables: Mapping[str, str]


def free_port() -> int:
    """A port of loopback that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def serving(server: Server, log: Path) -> Iterator[str]:
    """The URL of the running server, which ends with the block. Raises PeerError where it does not start."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [part.replace("{port}", str(port)) for part in server.command]
    with log.open("wb") as out:
        # A session of its own: its children can be ended with it, whatever it does with them.
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **OFFLINE, **server.variables},
            start_new_session=True,
        )
        try:
            _await_ready(server, process, url, log)
            yield url
        finally:
            stop(process)


def _await_ready(server: Server, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise PeerError(f"{server.name} ended with {process.returncode}; the end of {log}:\n{tail(log)}")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url + server.ready, timeout=5, trust_env=False).status_code == 200:
                return
        time.sleep(0.5)
    raise PeerError(f"{server.name} does not serve after {START_SECONDS:g} s; the end of {log}:\n{tail(log)}")


def stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, patience, then SIGKILL to whatever is left of its session."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def ask(command: Sequence[str], log: Path, variables: Mapping[str, str]) -> dict[str, Any]:
    """The JSON object that a program prints last on its standard output. Raises PeerError with its log."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=out,
            env={**os.environ, **OFFLINE, **variables},
            start_new_session=True,
        )
        try:
            printed, _ = process.communicate()
        finally:
            stop(process)
    # The load client ends with 1 and a report where requests failed: that is an answer too.
    answer = last_object(printed.decode(errors="replace"))
    if answer is None:
        raise PeerError(f"{' '.join(command[:4])} … ended with {process.returncode}; the end of {log}:\n{tail(log)}")
    return answer


def last_object(printed: str) -> dict[str, Any] | None:
    """The JSON object that ends what was printed, on one line or indented over many; None where there is none."""
    start = max(printed.rfind("\n{"), -1) + 1
    try:
        answer = json.loads(printed[start:])
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None
