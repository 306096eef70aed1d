"""What happens when something is lost: messages, workers, gateways, scripts, the server itself."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from polygraft.errors import ApiError
from polygraft.queue import keys
from polygraft.queue.gateway import GatewayQueue
from polygraft.queue.limits import QueueLimits
from polygraft.queue.messages import Job, Usage
from polygraft.queue.worker import ClaimedJob, Emission, QueueUnavailable, WorkerQueue
from polygraft.valkey import PrivateValkey

from .conftest import MODEL, card_of, emit, read_all, status_of

pytestmark = pytest.mark.slow  # lost things are noticed after a while, and these tests wait for it

MakeJob = Callable[..., Job]


@pytest.fixture
def mortal(valkey: str, limits: QueueLimits) -> Iterator[WorkerQueue]:
    """A worker that counts as gone soon after its last heartbeat."""
    queue = WorkerQueue(valkey, "mortal", MODEL, limits)
    queue.register(card_of(), status_of("mortal"))
    yield queue
    queue.close()


async def read_soon(stream: object) -> list[object]:
    async with asyncio.timeout(5):
        return await read_all(stream)  # type: ignore[arg-type]


async def outlive_grace(limits: QueueLimits) -> None:
    """Let the reaper see that nobody was merely cut off."""
    await asyncio.sleep(limits.worker_ttl + 3 * limits.beat)


# Messages


async def test_a_gap_is_read_from_the_record(
    valkey: str, gateway: GatewayQueue, worker: WorkerQueue, make_job: MakeJob
) -> None:
    stream = await gateway.open(make_job())
    [claimed] = worker.claim(1, "n")
    worker.publish(1.0, [emit(claimed, 0)])
    await anext(stream)
    with redis.Redis.from_url(valkey) as client:
        client.rename(keys.GATEWAY_JOBS + "g1", "aside")
        # Two events that are recorded and never announced: their gateway is another one for a moment.
        client.hset(keys.JOB + claimed.job.id, "gateway", "elsewhere")
        worker.publish(1.0, [emit(claimed, 1)])
        worker.publish(1.0, [emit(claimed, 2)])
        client.hset(keys.JOB + claimed.job.id, "gateway", "g1")
        client.rename("aside", keys.GATEWAY_JOBS + "g1")
    worker.publish(1.0, [emit(claimed, 3, final=True)])
    rest = await read_soon(stream)
    assert [event.seq for event in rest] == [1, 2, 3]


async def test_a_lost_last_message_is_noticed(
    valkey: str, gateway: GatewayQueue, worker: WorkerQueue, make_job: MakeJob
) -> None:
    stream = await gateway.open(make_job())
    [claimed] = worker.claim(1, "n")
    with redis.Redis.from_url(valkey) as client:
        client.hset(keys.JOB + claimed.job.id, "gateway", "elsewhere")
    worker.publish(1.0, [emit(claimed, 0, final=True)])
    assert [event.final for event in await read_soon(stream)] == [True]


async def test_jobs_whose_record_is_gone_end_with_an_error_and_stop_nobody(
    valkey: str, gateway: GatewayQueue, worker: WorkerQueue, make_job: MakeJob, limits: QueueLimits
) -> None:
    running = await gateway.open(make_job())
    worker.claim(1, "n")
    queued = [await gateway.open(make_job()), await gateway.open(make_job(deadline=time.time() + 0.3))]
    with redis.Redis.from_url(valkey) as client:
        client.delete(*(keys.JOB + stream.job.id for stream in (running, *queued)))
    for stream in (running, *queued):
        [event] = await read_soon(stream)
        assert event.error is not None
        assert (event.error.status, event.error.code) == (503, "dependency_unavailable")
    await outlive_grace(limits)
    assert worker.claim(9, "m") == []
    assert await gateway.depth() == 0
    assert await gateway.ping()
    with redis.Redis.from_url(valkey) as client:
        assert client.zcard(keys.RUNNING) == 0


async def test_a_slow_reader_gets_everything_merged_and_holds_up_nobody(
    gateway: GatewayQueue, worker: WorkerQueue, make_job: MakeJob
) -> None:
    slow, quick = await gateway.open(make_job()), await gateway.open(make_job())
    claimed = worker.claim(2, "n")
    for seq in range(500):
        worker.publish(1.0, [emit(one, seq, text=f"{seq} ", final=seq == 499) for one in claimed])
    assert len(await read_soon(quick)) >= 1
    events = await read_soon(slow)
    assert len(events) < 100
    assert "".join(delta.text for event in events for delta in event.deltas) == "".join(f"{n} " for n in range(500))
    assert [token for event in events for delta in event.deltas for token in delta.token_ids] == list(range(500))
    assert events[-1].usage == Usage(prompt_tokens=3, cached_tokens=0, completion_tokens=500)


# Workers


async def test_an_unbegun_job_of_a_dead_worker_goes_to_another(
    gateway: GatewayQueue, mortal: WorkerQueue, worker: WorkerQueue, make_job: MakeJob, limits: QueueLimits
) -> None:
    stream = await gateway.open(make_job())
    [first] = mortal.claim(1, "n")
    await outlive_grace(limits)
    [second] = worker.claim(1, "n")
    assert (second.job, second.attempt) == (first.job, 2)
    assert mortal.publish(1.0, [emit(first, 0)]).stale == {first.job.id}
    worker.publish(1.0, [emit(second, 0, text="second", final=True)])
    assert [event.deltas[0].text for event in await read_soon(stream)] == ["second"]


async def test_a_begun_job_of_a_dead_worker_fails(
    gateway: GatewayQueue, mortal: WorkerQueue, make_job: MakeJob, limits: QueueLimits
) -> None:
    stream = await gateway.open(make_job())
    [claimed] = mortal.claim(1, "n")
    mortal.publish(1.0, [emit(claimed, 0)])
    started = time.monotonic()
    first, last = await read_soon(stream)
    assert (first.error, last.error is not None) == (None, True)
    assert last.error.status == 503
    assert time.monotonic() - started < 3


async def test_a_job_that_kills_its_workers_is_not_tried_for_ever(
    valkey: str, gateway: GatewayQueue, make_job: MakeJob, limits: QueueLimits
) -> None:
    stream = await gateway.open(make_job())
    attempts = 0
    async with asyncio.timeout(10):
        while not stream.ended:
            victim = WorkerQueue(valkey, f"victim-{attempts}", MODEL, limits)
            victim.register(card_of(), status_of(victim.worker_id))
            attempts += len(victim.claim(1, f"{time.monotonic()}"))
            victim.close()
            await asyncio.sleep(0.1)
    assert attempts == limits.max_losses
    [event] = await read_soon(stream)
    assert event.error is not None


async def test_a_worker_that_lives_but_does_not_report_loses_its_jobs(
    gateway: GatewayQueue, worker: WorkerQueue, make_job: MakeJob
) -> None:
    stream = await gateway.open(make_job())
    [claimed] = worker.claim(1, "n")
    worker.publish(1.0, [emit(claimed, 0)])
    assert (await read_soon(stream))[-1].error is not None
    assert worker.publish(1.0, [emit(claimed, 1)]).stale == {claimed.job.id}


async def test_renewing_keeps_a_silent_job(gateway: GatewayQueue, worker: WorkerQueue, make_job: MakeJob) -> None:
    stream = await gateway.open(make_job())
    [claimed] = worker.claim(1, "n")
    for _ in range(10):
        await asyncio.sleep(0.15)
        assert worker.publish(1.0, [Emission(claimed.job.id, claimed.attempt)]).stale == set()
    worker.publish(1.0, [emit(claimed, 0, final=True)])
    assert [event.error for event in await read_soon(stream)] == [None]


async def test_a_cancelled_job_of_a_dead_worker_is_aborted_not_repeated(
    gateway: GatewayQueue, mortal: WorkerQueue, worker: WorkerQueue, make_job: MakeJob
) -> None:
    stream = await gateway.open(make_job())
    mortal.claim(1, "n")
    await stream.cancel()
    [event] = await read_soon(stream)
    assert (event.error, event.deltas[0].finish_reason) == (None, "abort")
    assert worker.claim(1, "n") == []


async def test_given_back_jobs_come_first_and_count_as_no_loss(
    gateway: GatewayQueue, worker: WorkerQueue, make_job: MakeJob
) -> None:
    jobs = [make_job() for _ in range(2)]
    for job in jobs:
        await gateway.open(job)
    for nonce in range(5):
        [claimed] = worker.claim(1, str(nonce))
        assert claimed.job.id == jobs[0].id
        worker.release([claimed])
    assert await gateway.depth() == 2


async def test_a_job_that_waits_past_its_deadline_ends_with_an_error(gateway: GatewayQueue, make_job: MakeJob) -> None:
    stream = await gateway.open(make_job(deadline=time.time() + 0.2))
    [event] = await read_soon(stream)
    assert event.error is not None
    assert (event.error.status, event.error.code) == (503, "overloaded")
    assert await gateway.depth() == 0


# Gateways


async def test_the_jobs_of_a_vanished_gateway_are_cancelled(
    valkey: str, gateway: GatewayQueue, worker: WorkerQueue, make_job: MakeJob, limits: QueueLimits
) -> None:
    vanishing = await GatewayQueue.connect(valkey, "g2", limits)
    running = await vanishing.open(make_job(gateway="g2"))
    [claimed] = worker.claim(1, "n")
    await vanishing.open(make_job(gateway="g2"))
    await vanishing._tasks.end()
    cancelled: frozenset[str] = frozenset()
    async with asyncio.timeout(5):
        while not cancelled:
            await asyncio.sleep(0.1)
            cancelled = worker.publish(1.0, [Emission(claimed.job.id, claimed.attempt)]).cancelled
    assert cancelled == {running.job.id}
    assert await gateway.depth() == 0
    await vanishing.close()


async def test_closing_cancels_and_ends_streams(
    valkey: str, worker: WorkerQueue, make_job: MakeJob, limits: QueueLimits
) -> None:
    closing = await GatewayQueue.connect(valkey, "g2", limits)
    stream = await closing.open(make_job(gateway="g2"))
    worker.claim(1, "n")
    await closing.close()
    assert worker.publish(1.0, []).cancelled == {stream.job.id}
    [event] = await read_soon(stream)
    assert event.error is not None


# The server


async def test_scripts_are_sent_again_after_a_flush(
    valkey: str, gateway: GatewayQueue, worker: WorkerQueue, make_job: MakeJob
) -> None:
    with redis.Redis.from_url(valkey) as client:
        client.script_flush()
    stream = await gateway.open(make_job())
    [claimed] = worker.claim(1, "n")
    with redis.Redis.from_url(valkey) as client:
        client.script_flush()
    worker.publish(1.0, [emit(claimed, 0, final=True)])
    assert len(await read_soon(stream)) == 1


@pytest.fixture
async def restartable(tmp_path: Path) -> AsyncIterator[PrivateValkey]:
    server = PrivateValkey(tmp_path)
    server.start()
    yield server
    server.stop()


async def test_jobs_and_streams_outlive_a_restart_of_the_server(
    restartable: PrivateValkey, make_job: MakeJob, limits: QueueLimits
) -> None:
    patient = replace(limits, lease=10.0, worker_ttl=10.0, gateway_ttl=10.0, outage=10.0)
    gateway = await GatewayQueue.connect(restartable.url, "g1", patient)
    worker = WorkerQueue(restartable.url, "w1", MODEL, patient)
    worker.register(card_of(), status_of("w1"))
    begun, queued = await gateway.open(make_job()), await gateway.open(make_job())
    [claimed] = worker.claim(1, "n")
    worker.publish(1.0, [emit(claimed, 0)])
    restartable.stop()
    late = asyncio.create_task(asyncio.to_thread(worker.publish, 2.0, [emit(claimed, 1, final=True)]))
    await asyncio.sleep(0.3)
    assert not await gateway.ping()
    with pytest.raises(ApiError) as refused:
        await gateway.open(make_job())
    assert (refused.value.status, refused.value.code) == (503, "dependency_unavailable")
    restartable.start()
    assert (await late).stale == set()
    assert [event.seq for event in await read_soon(begun)] == [0, 1]
    [second] = worker.claim(1, "m")
    assert second.job.id == queued.job.id
    worker.publish(3.0, [emit(second, 0, final=True)])
    assert len(await read_soon(queued)) == 1
    worker.close()
    await gateway.close()


async def test_nobody_counts_as_gone_because_the_server_was_away(
    restartable: PrivateValkey, make_job: MakeJob, limits: QueueLimits
) -> None:
    gateway = await GatewayQueue.connect(restartable.url, "g1", replace(limits, outage=30.0))
    worker = WorkerQueue(restartable.url, "w1", MODEL, replace(limits, outage=30.0, worker_ttl=1.0, lease=1.0))
    worker.register(card_of(), status_of("w1"))
    stream = await gateway.open(make_job())
    [claimed] = worker.claim(1, "n")
    worker.publish(1.0, [emit(claimed, 0)])
    restartable.stop()
    await asyncio.sleep(1.2)
    restartable.start()
    worker.heartbeat(status_of("w1"))
    worker.publish(2.0, [emit(claimed, 1, final=True)])
    assert [event.error for event in await read_soon(stream)] == [None, None]
    worker.close()
    await gateway.close()


async def test_no_stream_hangs_when_the_server_stays_away(
    restartable: PrivateValkey, make_job: MakeJob, limits: QueueLimits
) -> None:
    gateway = await GatewayQueue.connect(restartable.url, "g1", replace(limits, outage=0.5))
    stream = await gateway.open(make_job())
    worker = WorkerQueue(restartable.url, "w1", MODEL, replace(limits, outage=0.5))
    restartable.stop()
    with pytest.raises(QueueUnavailable):
        worker.claim(1, "n")
    async with asyncio.timeout(15):
        [event] = await read_all(stream)
    assert event.error is not None
    assert (event.error.status, event.error.code) == (503, "dependency_unavailable")
    worker.close()
    await gateway.close()


async def test_a_gateway_without_a_server_says_so(tmp_path: Path) -> None:
    with pytest.raises(ApiError) as refused:
        await GatewayQueue.connect(f"unix://{tmp_path / 'nothing'}", "g1")
    assert refused.value.code == "dependency_unavailable"


async def test_what_the_server_forgot_is_not_told_out_of_order(
    valkey: str, gateway: GatewayQueue, worker: WorkerQueue, make_job: MakeJob
) -> None:
    stream = await gateway.open(make_job())
    [claimed] = worker.claim(1, "n")
    worker.publish(1.0, [emit(claimed, 0)])
    worker.publish(1.0, [emit(claimed, 1)])
    with redis.Redis.from_url(valkey) as client:
        client.rpop(keys.EVENTS + claimed.job.id)
    assert worker.publish(1.0, [emit(claimed, 2)]).stale == {claimed.job.id}
    events = await read_soon(stream)
    assert [event.seq for event in events] == [0, 1, 2]
    assert events[-1].error is not None


async def test_nothing_is_left_behind(valkey: str, worker: WorkerQueue, make_job: MakeJob, limits: QueueLimits) -> None:
    gateway = await GatewayQueue.connect(valkey, "g1", replace(limits, record_ttl=0.2))
    streams = [await gateway.open(make_job(tenant)) for tenant in ("a", "b", "a")]
    await streams[0].cancel()
    claimed: list[ClaimedJob] = worker.claim(9, "n")
    quick = WorkerQueue(valkey, "w1", MODEL, replace(limits, record_ttl=0.2))
    await streams[1].cancel()
    quick.publish(1.0, [emit(one, 0, final=True) for one in claimed])
    for stream in streams:
        with contextlib.suppress(StopAsyncIteration):
            await read_soon(stream)
    quick.wait(0.01)
    quick.deregister()
    quick.close()
    await asyncio.sleep(0.4)
    with redis.Redis.from_url(valkey) as client:
        left = {key.decode() for key in client.scan_iter()}
    assert left == {keys.GATEWAYS, keys.REAPER, keys.CARDS, keys.CARD + MODEL}
    await gateway.close()


async def test_a_task_that_dies_is_told_to_whoever_can_start_anew(
    gateway: GatewayQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    telling = asyncio.create_task(gateway.broken())
    assert await gateway.ping()
    assert not telling.done()

    async def bug() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(gateway, "_beat", bug)
    async with asyncio.timeout(5):
        with pytest.raises(ZeroDivisionError):
            await telling
    assert not await gateway.ping()
