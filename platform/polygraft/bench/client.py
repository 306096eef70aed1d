"""A lean HTTP/1.1 client for event streams: it shares the machine with the server that it measures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import cast
from urllib.parse import urlsplit

import httptools

from polygraft.errors import PolygraftError

OnEvent = Callable[[bytes, float], None]
"""Gets the data of a server-sent event and the moment of its arrival (time.perf_counter())."""


class BenchError(PolygraftError):
    """A request that did not end as it should."""


class Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._done: asyncio.Future[None] | None = None
        self._on_event: OnEvent | None = None
        self._pending = b""
        self._arrived = 0.0
        self._streaming = False
        self._body = b""
        self.closed = False

    async def post(self, head: bytes, body: bytes, on_event: OnEvent) -> None:
        """Send and wait for the whole answer. Raises BenchError unless it is 200 and complete."""
        assert self._transport is not None
        assert self._done is None, "one request at a time"
        self._done = asyncio.get_running_loop().create_future()
        self._on_event, self._pending, self._body = on_event, b"", b""
        self._transport.write(b"%bContent-Length: %d\r\n\r\n%b" % (head, len(body), body))
        try:
            await self._done
        finally:
            self._done = None

    def close(self) -> None:
        """Hang up."""
        self.closed = True
        if self._transport is not None:
            self._transport.close()

    # asyncio calls these

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        # uvloop's transports are of no asyncio class.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._arrived = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"no HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self.closed = True
        self._fail("the server closed the connection")

    # httptools calls these

    def on_message_begin(self) -> None:
        """A response begins; each has a parser of its own state."""
        self._streaming = False

    def on_headers_complete(self) -> None:
        """Only a 200 carries events."""
        self._streaming = self._parser.get_status_code() == 200

    def on_body(self, data: bytes) -> None:
        """Hand on every event that is whole by now."""
        if not self._streaming:
            self._body += data
            return
        assert self._on_event is not None
        *events, self._pending = (self._pending + data).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: "):
                self._on_event(event[6:], self._arrived)

    def on_message_complete(self) -> None:
        """The answer is whole."""
        if not self._parser.should_keep_alive():
            self.closed = True
        if not self._streaming:
            self._fail(f"{self._parser.get_status_code()}: {self._body[:300].decode(errors='replace')}")
        elif self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _fail(self, why: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(BenchError(why))


class Client:
    """Connections to one server, kept open between requests."""

    def __init__(self, url: str, api_key: str | None, timeout: float) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise BenchError(f"{url!r} is no http URL")
        self._host, self._tls = parts.hostname, parts.scheme == "https"
        self._port = parts.port if parts.port is not None else (443 if self._tls else 80)
        self._timeout = timeout
        key = "" if api_key is None else f"Authorization: Bearer {api_key}\r\n"
        self._head = f"Host: {parts.netloc}\r\nContent-Type: application/json\r\n{key}"
        self._idle: list[Connection] = []

    async def post(self, path: str, body: bytes, on_event: OnEvent) -> None:
        """POST and hand each event of the answer to `on_event`. Raises BenchError."""
        head = f"POST {path} HTTP/1.1\r\n{self._head}".encode()
        connection: Connection | None = None
        try:
            async with asyncio.timeout(self._timeout):
                connection = await self._connection()
                await connection.post(head, body, on_event)
        except TimeoutError:
            raise BenchError(f"no answer within {self._timeout:g} seconds") from None
        except OSError as error:
            raise BenchError(f"cannot connect: {error}") from None
        else:
            if not connection.closed:
                self._idle.append(connection)
                connection = None
        finally:
            if connection is not None:
                connection.close()

    async def _connection(self) -> Connection:
        while self._idle:
            idle = self._idle.pop()
            if not idle.closed:
                return idle
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(Connection, self._host, self._port, ssl=self._tls if self._tls else None)
        return made

    def close(self) -> None:
        """Hang up everywhere."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
