"""Answers as server-sent events, one write per arrived event."""

from __future__ import annotations

import asyncio
import time

import structlog
from starlette.types import Receive, Scope, Send

from polygraft.errors import ApiError, internal_error
from polygraft.openai import wire
from polygraft.openai.answer import Answer, failure
from polygraft.openai.call import Call
from polygraft.queue.stream import Arrived, JobStream

log = structlog.get_logger(__name__)

_KEEP_ALIVE = b": keep-alive\n\n"
_DONE = b"data: [DONE]\n\n"


class StreamedAnswer(Answer):
    """The chunks of OpenAI's streams.

    The 200 is sent with the first news, or with the first keep-alive: a job that fails before either gets its own
    status. After it, an error is `data: {"error": ...}` and the stream ends without [DONE].
    """

    async def answer(self, events: JobStream, scope: Scope, receive: Receive, send: Send) -> int:
        """See Answer."""
        body = _Body(send, self.call)
        pulse = asyncio.create_task(body.keep_alive(self.inference.keep_alive))
        pulse.add_done_callback(_tell_of_failure)
        try:
            async for arrived in events:
                if (error := failure(arrived.event)) is not None:
                    raise error
                self.observe(arrived.event)
                if data := self._frames(arrived):
                    await body.write(data, last=arrived.event.final)
                    if arrived.step_ended is not None:
                        self.inference.observer.added_latency(time.time() - arrived.step_ended)
        except Exception as error:
            if not body.started:
                raise
            if not isinstance(error, ApiError):
                log.error("stream_failed", job=self.call.job.id, exc_info=error)
                error = internal_error()
            await body.write(_frame(wire.encode(error.body())), last=True)
            return error.status
        else:
            return 200
        finally:
            pulse.cancel()

    def _frames(self, arrived: Arrived) -> bytes:
        """What an event adds to the stream; empty if it tells nothing yet."""
        event, answer = arrived.event, self.call.format
        frames = [_frame(wire.encode(chunk)) for delta in event.deltas for chunk in answer.chunks(delta)]
        if event.usage is not None:
            if self.call.include_usage:
                frames.append(_frame(wire.encode(answer.usage_chunk(event.usage))))
            frames.append(_DONE)
        return b"".join(frames)


def _tell_of_failure(pulse: asyncio.Task[None]) -> None:
    # awaiting the task instead would hold up the answer's end, and a client that leaves then would count as hung up
    if not pulse.cancelled() and (error := pulse.exception()) is not None:
        log.error("keep_alive_failed", exc_info=error)


class _Body:
    """The response's body; its headers go out with the first write."""

    def __init__(self, send: Send, call: Call) -> None:
        self._send = send
        self._call = call
        self._written = time.monotonic()
        self._writing = False
        self.started = False

    async def keep_alive(self, silence: float) -> None:
        """Write a comment after every `silence` seconds without a write, until cancelled. No event sets a timer."""
        while True:
            remaining = self._written + silence - time.monotonic()
            if remaining > 0:
                await asyncio.sleep(remaining)
            elif self._writing:
                # The client does not read; a comment would only come behind what it has not read.
                await asyncio.sleep(silence)
            else:
                await self.write(_KEEP_ALIVE)

    async def write(self, data: bytes, *, last: bool = False) -> None:
        """Send `data`, which holds whole events; nothing may follow the `last`."""
        self._writing = True
        if not self.started:
            self.started = True
            headers = {
                "content-type": "text/event-stream; charset=utf-8",
                "cache-control": "no-cache",
                "x-accel-buffering": "no",
                **self._call.headers,
            }
            raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
            await self._send({"type": "http.response.start", "status": 200, "headers": raw})
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})
        self._writing = False
        self._written = time.monotonic()


def _frame(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
