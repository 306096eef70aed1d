"""Sockets and the HTTP server on them."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator
from dataclasses import dataclass

import uvicorn
from starlette.types import ASGIApp

from polygraft.errors import ConfigError

BACKLOG = 2048


@dataclass(frozen=True, slots=True)
class Listeners:
    """A gateway's listening sockets."""

    http: socket.socket
    metrics: socket.socket


def listen(host: str, port: int, option: str) -> socket.socket:
    """A listening TCP socket; port 0 takes a free one. Raises ConfigError, naming the option that chose the port."""
    listener: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Listening at once is what keeps a second server off the port.
        listener.listen(BACKLOG)
    except OSError as error:
        if listener is not None:
            listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} on {host} is in use; choose another with {option}") from None
        raise ConfigError(f"cannot listen on {host} port {port} ({option}): {error.strerror}") from None
    listener.setblocking(False)
    return listener


def port_of(listener: socket.socket) -> int:
    """The port that was taken."""
    port: int = listener.getsockname()[1]
    return port


class HttpServer(uvicorn.Server):
    """uvicorn on a listening socket. Signals are the caller's: `stop()` ends it."""

    def __init__(self, app: ASGIApp, *, drain_seconds: float) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                # Headers as proxies forward them are of no use here, and a client could send them too.
                proxy_headers=False,
                timeout_graceful_shutdown=round(drain_seconds),
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Takes no signal handler."""
        yield

    def stop(self) -> None:
        """Accept nothing more, let running answers end within the drain time, then return from `serve`."""
        self.should_exit = True
