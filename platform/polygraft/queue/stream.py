"""The news of one job, as its gateway hands them to whoever answers the client."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple

from polygraft.queue.messages import ChoiceDelta, Job, JobError, JobEvent, Usage

_COALESCE_ABOVE = 64
"""Unread arrivals of a slow reader are merged into one when there are more than this."""


class Arrived(NamedTuple):
    """One event; `step_ended` (Unix seconds) is None if it was read from the record or merged."""

    event: JobEvent
    step_ended: float | None


class JobStream:
    """Iterate to get a job's events in order, without a gap; the last one is final.

    The queue's listener delivers and never waits for the reader, so a slow reader holds up nobody: what it has not
    read is merged, and is never more than the answer itself.
    """

    def __init__(
        self,
        job: Job,
        on_cancel: Callable[[JobStream], Awaitable[None]],
        on_usage: Callable[[Usage], None] = lambda _: None,
    ) -> None:
        self.job = job
        self.next_seq = 0
        self.ended = False
        """The final event has been delivered (it may not have been read yet)."""
        self.submitted = False
        """There is a record to read."""
        self.behind = False
        """An event is missing: the record has to be read."""
        self.reading = False
        """Somebody is reading the record now."""
        self.heard = time.monotonic()
        self._on_cancel = on_cancel
        self._on_usage = on_usage
        self._interrupted = False
        """The reader has been told that this is the end; the job's own end is still to come."""
        self._unread: deque[Arrived] = deque()
        self._reader: asyncio.Future[None] | None = None
        """Who waits for an arrival: a bare future, as this is done for every event of every stream."""
        self._exhausted = False

    def __aiter__(self) -> JobStream:
        return self

    async def __anext__(self) -> Arrived:
        if self._exhausted:
            raise StopAsyncIteration
        while not self._unread:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        arrived = self._unread.popleft()
        self._exhausted = arrived.event.final
        return arrived

    async def cancel(self) -> None:
        """Ask for the job's end. Idempotent; the final event still comes, with the usage so far.

        Safe to be interrupted: the wish is noted before the first await. Nothing for a stream that was interrupted,
        whose job has been asked to end already.
        """
        if not (self.ended or self._interrupted):
            await self._on_cancel(self)

    def deliver(self, events: Iterable[JobEvent], step_ended: float | None) -> None:
        """Take what follows on what is here; skip what is known; note if something is missing."""
        self.heard = time.monotonic()
        for event in events:
            if self.ended or event.seq < self.next_seq:
                continue
            if event.seq > self.next_seq:
                self.behind = True
                return
            self.next_seq += 1
            self.ended = event.final
            if event.usage is not None:
                self._on_usage(event.usage)
            if not self._interrupted:
                self._unread.append(Arrived(event, step_ended))
        if len(self._unread) > _COALESCE_ABOVE:
            self._unread = deque([Arrived(merge([arrived.event for arrived in self._unread]), None)])
        self._wake()

    def fail(self, error: JobError) -> None:
        """End the stream from this side, when nothing can be heard of the job any more."""
        self.deliver([JobEvent(job=self.job.id, seq=self.next_seq, error=error)], None)

    def interrupt(self, error: JobError) -> None:
        """End the stream for its reader; what the job has used is still heard of."""
        if not (self.ended or self._interrupted):
            self._interrupted = True
            self._unread.append(Arrived(JobEvent(job=self.job.id, seq=self.next_seq, error=error), None))
            self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def merge(events: list[JobEvent]) -> JobEvent:
    """One event that says what these consecutive ones say."""
    by_choice: dict[int, list[ChoiceDelta]] = {}
    for event in events:
        for delta in event.deltas:
            by_choice.setdefault(delta.index, []).append(delta)
    last = events[-1]
    deltas = tuple(_merge_deltas(deltas) for deltas in by_choice.values())
    return JobEvent(job=last.job, seq=last.seq, deltas=deltas, usage=last.usage, error=last.error)


def _merge_deltas(deltas: list[ChoiceDelta]) -> ChoiceDelta:
    last = deltas[-1]
    prompt_logprobs = [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None]
    return ChoiceDelta(
        index=last.index,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
        prompt_logprobs=prompt_logprobs[0] if prompt_logprobs else None,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
    )
