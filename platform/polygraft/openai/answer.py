"""Runs an admitted call and answers it whole; `streaming` has the other way. A client that leaves ends its job."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from polygraft.errors import CLIENT_LEFT, ApiError, internal_error
from polygraft.openai import wire
from polygraft.openai.call import Call, processing_time
from polygraft.openai.inference import Inference
from polygraft.queue.messages import JobError, JobEvent, Usage
from polygraft.queue.stream import JobStream, merge
from polygraft.tenancy.admissions import admission_of


class Answer(Response, ABC):
    """An ASGI response that queues the job, and cancels it if it has not ended when the response has. A caller whose
    key is revoked meanwhile gets that as its last event.

    Raises ApiError as long as nothing has been sent, so that whatever is refused is refused with its own status.
    """

    def __init__(self, inference: Inference, call: Call) -> None:
        super().__init__()
        self.inference = inference
        self.call = call
        self._last_tokens: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. Returns without an answer if the client has left."""
        model, observer = self.call.job.model, self.inference.observer
        try:
            status = await self._run(scope, receive, send)
        except ApiError as error:
            error.headers.update(processing_time(self.call.started))
            observer.outcome(model, error.status)
            raise
        except Exception:
            observer.outcome(model, 500)
            raise
        observer.outcome(model, status)
        if status == 200:
            observer.end_to_end(model, time.perf_counter() - self.call.started)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> int:
        admission = admission_of(scope)
        admission.require()
        events = await self.inference.queue.open(self.call.job, used=self._used)
        answering = asyncio.create_task(self.answer(events, scope, receive, send))
        leaving = asyncio.create_task(_disconnected(receive))
        try:
            admission.when_ended(lambda error: self.inference.queue.end(events, _job_error(error)))
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
            return answering.result() if answering.done() else CLIENT_LEFT
        finally:
            answering.cancel()
            leaving.cancel()
            await events.cancel()  # which is nothing for a job that has ended
            await asyncio.gather(answering, leaving, return_exceptions=True)

    def _used(self, usage: Usage) -> None:
        """Tell the observer. After the answer's end where the client has left, or may not go on."""
        self.inference.observer.tokens(
            self.call.job.model, usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens
        )

    @abstractmethod
    async def answer(self, events: JobStream, scope: Scope, receive: Receive, send: Send) -> int:
        """Send the answer and return its status; raise ApiError only while nothing has been sent."""

    def observe(self, event: JobEvent) -> None:
        """Tell the observer of the pace of tokens."""
        model, observer = self.call.job.model, self.inference.observer
        if any(delta.token_ids for delta in event.deltas):
            now = time.perf_counter()
            if self._last_tokens is None:
                observer.first_token(model, now - self.call.started)
            else:
                observer.inter_token(model, now - self._last_tokens)
            self._last_tokens = now


class WholeAnswer(Answer):
    """One JSON document when the job has ended."""

    async def answer(self, events: JobStream, scope: Scope, receive: Receive, send: Send) -> int:
        """See Answer."""
        news: list[JobEvent] = []
        async for arrived in events:
            if (error := failure(arrived.event)) is not None:
                raise error
            self.observe(arrived.event)
            news.append(arrived.event)
        usage = news[-1].usage
        assert usage is not None, "the final event of a job that has not failed carries its usage"
        choices = sorted(merge(news).deltas, key=lambda choice: choice.index)
        body = wire.encode(self.call.format.whole(choices, usage))
        await Response(body, media_type="application/json", headers=self.call.headers)(scope, receive, send)
        return 200


def _job_error(error: ApiError) -> JobError:
    return JobError(status=error.status, type=error.type, code=error.code, message=error.message)


def failure(event: JobEvent) -> ApiError | None:
    """What went wrong with the job, if this event says so."""
    if event.error is not None:
        error = event.error
        headers = {"Retry-After": "1"} if error.status in (429, 503) else None
        return ApiError(
            error.status,
            error.message,
            type=error.type,
            param=error.param,
            code=error.code,
            headers=headers,
            errors=None if error.errors is None else list(error.errors),
        )
    if any(delta.finish_reason == "error" for delta in event.deltas):
        return internal_error()
    return None


async def _disconnected(receive: Receive) -> None:
    """Return when the client is gone; the body has been read, so nothing else can come."""
    while (await receive())["type"] != "http.disconnect":
        pass
