"""Both ends of the queue, over a real server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import redis

from polygraft.errors import ApiError, ConfigError
from polygraft.queue import keys
from polygraft.queue.gateway import GatewayQueue
from polygraft.queue.limits import QueueLimits
from polygraft.queue.messages import Job, JobError, JobEvent, Usage
from polygraft.queue.worker import Emission, WorkerQueue

from .conftest import MODEL, card_of, emit, read_all, status_of

MakeJob = Callable[..., Job]


async def test_a_job_goes_to_a_worker_and_its_events_come_back(
    gateway: GatewayQueue, worker: WorkerQueue, make_job: MakeJob
) -> None:
    job = make_job()
    stream = await gateway.open(job)
    assert await gateway.depth() == 1
    [claimed] = worker.claim(4, "n1")
    assert claimed.job == job
    assert claimed.attempt == 1
    assert await gateway.depth() == 0
    ended = time.time()
    worker.publish(ended, [emit(claimed, 0)])
    worker.publish(ended, [emit(claimed, 1, final=True)])

    arrivals = [arrived async for arrived in stream]
    assert [arrived.event.seq for arrived in arrivals] == [0, 1]
    assert [arrived.step_ended for arrived in arrivals] == [ended, ended]
    assert arrivals[-1].event.usage == Usage(prompt_tokens=3, cached_tokens=0, completion_tokens=2)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_tenants_take_turns_whatever_they_queue(
    gateway: GatewayQueue, worker: WorkerQueue, make_job: MakeJob
) -> None:
    for tenant in ("a", "a", "a", "a", "b", "c", "b"):
        await gateway.open(make_job(tenant))
    first = [claimed.job.tenant for claimed in worker.claim(4, "1")]
    second = [claimed.job.tenant for claimed in worker.claim(9, "2")]
    assert first == ["a", "b", "c", "a"]
    assert second == ["b", "a", "a"]
    assert worker.claim(9, "3") == []


async def test_a_burst_is_shared_between_the_workers(
    valkey: str, gateway: GatewayQueue, worker: WorkerQueue, make_job: MakeJob
) -> None:
    other = WorkerQueue(valkey, "w2", MODEL)
    other.register(card_of(), status_of("w2"))
    for _ in range(5):
        await gateway.open(make_job())
    assert [len(worker.claim(9, "1")), len(other.claim(9, "1")), len(worker.claim(9, "2"))] == [3, 1, 1]
    other.close()


async def test_a_claim_asked_again_gives_the_same_jobs(
    gateway: GatewayQueue, worker: WorkerQueue, make_job: MakeJob
) -> None:
    for _ in range(3):
        await gateway.open(make_job())
    first = worker.claim(2, "n")
    assert worker.claim(2, "n") == first
    assert len(worker.claim(2, "m")) == 1


async def test_an_empty_claim_asked_again_stays_empty(
    gateway: GatewayQueue, worker: WorkerQueue, make_job: MakeJob
) -> None:
    assert worker.claim(2, "n") == []
    await gateway.open(make_job())
    assert worker.claim(2, "n") == []


async def test_the_queue_is_bounded(gateway: GatewayQueue, make_job: MakeJob, limits: QueueLimits) -> None:
    for _ in range(limits.max_queued):
        await gateway.open(make_job())
    with pytest.raises(ApiError) as refused:
        await gateway.open(make_job())
    assert (refused.value.status, refused.value.code) == (503, "overloaded")
    assert int(refused.value.headers["Retry-After"]) >= 1


async def test_a_submission_sent_twice_is_queued_once(
    gateway: GatewayQueue, worker: WorkerQueue, make_job: MakeJob
) -> None:
    job = make_job()
    await gateway.open(job)
    await gateway.open(job)
    assert len(worker.claim(9, "n")) == 1


async def test_news_travels_in_one_message_per_gateway_and_step(
    valkey: str, gateway: GatewayQueue, worker: WorkerQueue, make_job: MakeJob, limits: QueueLimits
) -> None:
    other = await GatewayQueue.connect(valkey, "g2", limits)
    try:
        streams = [await gateway.open(make_job()) for _ in range(3)] + [await other.open(make_job(gateway="g2"))]
        claimed = worker.claim(9, "n")
        with redis.Redis.from_url(valkey).pubsub() as spy:
            spy.psubscribe(keys.CHANNEL + "*")
            spy.get_message(timeout=1)
            worker.publish(1.5, [emit(one, 0, final=True) for one in claimed])
            heard = [spy.get_message(timeout=0.2) for _ in range(3)]
        assert sorted(message["channel"] for message in heard if message) == [b"pg:to:g1", b"pg:to:g2"]
        assert [len(await read_all(stream)) for stream in streams] == [1, 1, 1, 1]
    finally:
        await other.close()


async def test_more_events_than_a_short_array_holds(
    valkey: str, make_job: MakeJob, limits: QueueLimits, worker: WorkerQueue
) -> None:
    gateway = await GatewayQueue.connect(valkey, "g1", replace(limits, max_queued=100))
    try:
        streams = [await gateway.open(make_job()) for _ in range(40)]
        worker.publish(2.5, [emit(one, 0, final=True) for one in worker.claim(99, "n")])
        arrivals = [await anext(stream) for stream in streams]
        assert {arrived.step_ended for arrived in arrivals} == {2.5}
    finally:
        await gateway.close()


# Fencing


async def test_only_the_attempt_that_holds_the_lease_may_publish(
    valkey: str, gateway: GatewayQueue, worker: WorkerQueue, make_job: MakeJob
) -> None:
    stream = await gateway.open(make_job())
    [claimed] = worker.claim(1, "n")
    stranger = WorkerQueue(valkey, "w2", MODEL)
    assert stranger.publish(1.0, [emit(claimed, 0)]).stale == {claimed.job.id}
    assert worker.publish(1.0, [emit(replace(claimed, attempt=7), 0)]).stale == {claimed.job.id}
    worker.release([claimed])
    [again] = stranger.claim(1, "n")
    assert again.attempt == 2
    assert worker.publish(1.0, [emit(claimed, 0, final=True)]).stale == {claimed.job.id}
    assert stranger.publish(1.0, [emit(again, 0, text="right", final=True)]).stale == set()
    assert [event.deltas[0].text for event in await read_all(stream)] == ["right"]
    stranger.close()


async def test_a_publish_sent_twice_counts_once(gateway: GatewayQueue, worker: WorkerQueue, make_job: MakeJob) -> None:
    stream = await gateway.open(make_job())
    [claimed] = worker.claim(1, "n")
    for _ in range(2):
        worker.publish(1.0, [emit(claimed, 0)])
    for _ in range(2):
        worker.publish(1.0, [emit(claimed, 1, final=True)])
    assert [event.seq for event in await read_all(stream)] == [0, 1]


async def test_ids_are_the_servers_and_jobs_never_cross(
    gateway: GatewayQueue, worker: WorkerQueue, make_job: MakeJob
) -> None:
    one, two = make_job(), make_job()
    first, second = await gateway.open(one), await gateway.open(two)
    claimed = {each.job.id: each for each in worker.claim(2, "n")}
    await first.cancel()
    assert worker.publish(1.0, []).cancelled == {one.id}
    worker.publish(1.0, [emit(claimed[two.id], 0, text="two", final=True)])
    assert [event.deltas[0].text for event in await read_all(second)] == ["two"]


# Cancelling


async def test_cancelling_a_queued_job_takes_it_out_and_ends_its_stream(
    gateway: GatewayQueue, worker: WorkerQueue, make_job: MakeJob
) -> None:
    stream, kept = await gateway.open(make_job(n=2)), await gateway.open(make_job())
    await stream.cancel()
    await stream.cancel()
    [event] = await read_all(stream)
    assert [delta.finish_reason for delta in event.deltas] == ["abort", "abort"]
    assert event.usage == Usage(prompt_tokens=0, cached_tokens=0, completion_tokens=0)
    assert [claimed.job.id for claimed in worker.claim(9, "n")] == [kept.job.id]


async def test_a_running_job_learns_of_its_cancelling_with_the_next_step(
    gateway: GatewayQueue, worker: WorkerQueue, make_job: MakeJob
) -> None:
    stream = await gateway.open(make_job())
    [claimed] = worker.claim(1, "n")
    assert worker.publish(1.0, [emit(claimed, 0)]).cancelled == set()
    await stream.cancel()
    assert worker.publish(1.0, [emit(claimed, 1)]).cancelled == {claimed.job.id}
    assert worker.publish(1.0, [emit(claimed, 2, final=True)]).cancelled == set()
    assert worker.publish(1.0, []).cancelled == set()
    assert (await read_all(stream))[-1].final


async def test_cancelling_wakes_a_worker_that_waits(
    gateway: GatewayQueue, worker: WorkerQueue, make_job: MakeJob
) -> None:
    stream = await gateway.open(make_job())
    worker.claim(1, "n")
    waiting = asyncio.create_task(asyncio.to_thread(worker.wait, 2.0, work=False))
    await asyncio.sleep(0.1)
    started = time.monotonic()
    await stream.cancel()
    await waiting
    assert time.monotonic() - started < 0.5


async def test_a_cancel_whose_caller_is_cancelled_still_happens(
    gateway: GatewayQueue, worker: WorkerQueue, make_job: MakeJob
) -> None:
    stream = await gateway.open(make_job())
    [claimed] = worker.claim(1, "n")
    leaving = asyncio.create_task(stream.cancel())
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.sleep(0.1)
    assert worker.publish(1.0, []).cancelled == {claimed.job.id}


async def test_a_job_that_ended_is_not_cancelled(gateway: GatewayQueue, worker: WorkerQueue, make_job: MakeJob) -> None:
    stream = await gateway.open(make_job())
    [claimed] = worker.claim(1, "n")
    worker.publish(1.0, [emit(claimed, 0, final=True)])
    [event] = await read_all(stream)
    await stream.cancel()
    assert event.deltas[0].finish_reason == "stop"
    assert worker.publish(1.0, []).cancelled == set()


async def test_a_deadline_cancels_a_running_job(gateway: GatewayQueue, worker: WorkerQueue, make_job: MakeJob) -> None:
    await gateway.open(make_job(deadline=time.time() + 0.2))
    [claimed] = worker.claim(1, "n")
    assert worker.publish(1.0, [Emission(claimed.job.id, 1)]).cancelled == set()
    await asyncio.sleep(0.25)
    assert worker.publish(1.0, [Emission(claimed.job.id, 1)]).cancelled == {claimed.job.id}


# Waiting


async def test_a_new_job_wakes_an_idle_worker(gateway: GatewayQueue, worker: WorkerQueue, make_job: MakeJob) -> None:
    worker.claim(1, "n")
    waiting = asyncio.create_task(asyncio.to_thread(worker.wait, 2.0))
    await asyncio.sleep(0.1)
    started = time.monotonic()
    await gateway.open(make_job())
    await waiting
    assert time.monotonic() - started < 0.5


async def test_nothing_queued_leaves_an_idle_worker_asleep(
    gateway: GatewayQueue, worker: WorkerQueue, make_job: MakeJob
) -> None:
    for _ in range(3):
        await gateway.open(make_job())
    worker.claim(9, "n")
    started = time.monotonic()
    await asyncio.to_thread(worker.wait, 0.2)
    assert time.monotonic() - started > 0.15


# Directory


async def test_the_directory_tells_who_serves_what(gateway: GatewayQueue, worker: WorkerQueue) -> None:
    [status] = await gateway.workers()
    assert (status.id, status.model, status.state) == ("w1", MODEL, "ready")
    assert await gateway.cards() == {MODEL: card_of()}
    worker.heartbeat(status_of("w1", "draining"))
    assert [status.state for status in await gateway.workers()] == ["draining"]
    worker.deregister()
    assert await gateway.workers() == []


async def test_workers_of_one_name_must_agree_on_the_model(
    valkey: str, gateway: GatewayQueue, worker: WorkerQueue
) -> None:
    other = WorkerQueue(valkey, "w2", MODEL)
    other.register(card_of(created=77), status_of("w2"))
    assert (await gateway.cards())[MODEL].created == 5
    with pytest.raises(ConfigError, match="served-model-name"):
        other.register(card_of(max_context=32), status_of("w2"))
    other.deregister()
    worker.deregister()
    other.register(card_of(max_context=32), status_of("w2"))
    other.close()


async def test_a_job_that_failed_says_why(gateway: GatewayQueue, worker: WorkerQueue, make_job: MakeJob) -> None:
    stream = await gateway.open(make_job())
    [claimed] = worker.claim(1, "n")
    error = JobError(status=400, type="invalid_request_error", code=None, message="no")
    worker.publish(1.0, [Emission(claimed.job.id, 1, JobEvent(job=claimed.job.id, seq=0, error=error))])
    [event] = await read_all(stream)
    assert event.error == error
    assert event.usage is None
