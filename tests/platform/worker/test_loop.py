"""The worker's loop over a real queue and an engine that does what it is told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace

import msgspec
import pytest
from tests.platform.worker.scripted_engine import A, ScriptedEngine
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from polygraft.blobs import BlobError, BlobUnavailable
from polygraft.queue.gateway import GatewayQueue, JobStream
from polygraft.queue.messages import LOAD_SECONDS, Job, JobEvent, Usage
from polygraft.queue.worker import WorkerQueue
from polygraft.worker.adapters import HostAdapters
from polygraft.worker.loop import WorkerLoop
from polygraft.worker.vitals import Heartbeat, Vitals
from polygraft_adapters.types import AdapterError, Problem
from polygraft_engine.types import EngineError, SamplingParams


class Weights:
    """An adapter."""

    nbytes = 1


def load(digest: str) -> Weights:
    time.sleep(0.05)
    if digest == "broken":
        raise EngineError("secret path")
    if digest == "damaged":
        raise BlobError("secret path is damaged")
    if digest == "away":
        raise BlobUnavailable("secret store does not answer")
    if digest == "wrong":
        raise AdapterError(
            [Problem("r", "is too large", "smaller"), Problem("q_proj.lora_A.weight", "is missing", kind="tensor")]
        )
    return Weights()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, "a": A}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@dataclass
class Rig:
    """A loop and what it works with."""

    loop: WorkerLoop
    engine: ScriptedEngine
    queue: WorkerQueue
    vitals: Vitals
    gateway: GatewayQueue

    async def turns(self, count: int) -> None:
        """Let the loop run on a thread of its own."""
        for _ in range(count):
            await asyncio.to_thread(self.loop.turn)
            self.loop.check()

    async def until_done(self) -> None:
        while self.loop.busy:
            await self.turns(1)


@pytest.fixture
def worker_queue(valkey: str) -> Iterator[WorkerQueue]:
    queue = WorkerQueue(valkey, "w", "m")
    yield queue
    queue.close()


@pytest.fixture
async def rig(valkey: str, worker_queue: WorkerQueue, tokenizer: Tokenizer) -> AsyncIterator[Rig]:
    gateway = await GatewayQueue.connect(valkey, "g")
    adapters = HostAdapters(load, 2, 1 << 20)
    engine, vitals = ScriptedEngine(), Vitals("w", "m")
    loop = WorkerLoop(worker_queue, engine, adapters, tokenizer, vitals, max_num_seqs=4, idle_seconds=0.05)
    yield Rig(loop, engine, worker_queue, vitals, gateway)
    adapters.close()
    await gateway.close()


@pytest.fixture
def make_job() -> Callable[..., Job]:
    numbers = iter(range(10**6))

    def make(prompts: tuple[tuple[int, ...], ...] = ((1, 1, 1),), adapter: str | None = None, **params: object) -> Job:
        return Job(
            id=f"j{next(numbers)}",
            model="m",
            tenant="t",
            gateway="g",
            adapter=adapter,
            prompts=prompts,
            params=replace(SamplingParams(max_tokens=3, seed=0), **params),  # type: ignore[arg-type]
            cache_namespace="t",
            submitted_at=time.time(),
        )

    return make


MakeJob = Callable[..., Job]


async def events_of(stream: JobStream) -> list[JobEvent]:
    async with asyncio.timeout(5):
        return [arrived.event async for arrived in stream]


async def test_one_event_a_step_and_usage_at_the_end(rig: Rig, make_job: MakeJob) -> None:
    stream = await rig.gateway.open(make_job())
    await rig.turns(1)
    await rig.until_done()
    events = await events_of(stream)
    assert [[delta.text for delta in event.deltas] for event in events] == [["a"], ["a"], ["a"]]
    assert events[-1].usage == Usage(prompt_tokens=3, cached_tokens=2, completion_tokens=3)


async def test_every_prompt_and_choice_is_a_choice_of_the_answer(rig: Rig, make_job: MakeJob) -> None:
    stream = await rig.gateway.open(make_job(prompts=((1,), (1, 1)), n=2))
    await rig.turns(1)
    assert [(one.prompt, one.choice) for one in rig.engine.live.values()] == [
        ((1,), 0), ((1,), 1), ((1, 1), 0), ((1, 1), 1)
    ]  # fmt: skip
    assert {one.cache_namespace for one in rig.engine.live.values()} == {"t"}
    await rig.until_done()
    events = await events_of(stream)
    assert sorted(delta.index for delta in events[-1].deltas) == [0, 1, 2, 3]
    assert events[-1].usage == Usage(prompt_tokens=3, cached_tokens=4, completion_tokens=12)


async def test_a_stop_string_ends_it_in_the_engine(rig: Rig, make_job: MakeJob) -> None:
    stream = await rig.gateway.open(make_job(max_tokens=100, stop=("aaaa",)))
    await rig.turns(1)
    await rig.until_done()
    assert not rig.engine.live
    events = await events_of(stream)
    assert "".join(delta.text for event in events for delta in event.deltas) == ""
    assert events[-1].deltas[0].stop_reason == "aaaa"
    assert events[-1].usage == Usage(prompt_tokens=3, cached_tokens=2, completion_tokens=4)


async def test_a_cancelled_job_leaves_the_engine_within_two_rounds(rig: Rig, make_job: MakeJob) -> None:
    stream = await rig.gateway.open(make_job(max_tokens=1000, n=2))
    await rig.turns(3)
    await stream.cancel()
    await rig.turns(2)
    assert not rig.engine.live
    events = await events_of(stream)
    assert [delta.finish_reason for event in events for delta in event.deltas if delta.finish_reason] == [
        "abort",
        "abort",
    ]
    assert events[-1].usage is not None
    assert 6 <= events[-1].usage.completion_tokens <= 10


async def test_a_refused_job_harms_no_other(rig: Rig, make_job: MakeJob) -> None:
    good, bad = await rig.gateway.open(make_job()), await rig.gateway.open(make_job(prompts=((1,), (-1,))))
    await rig.turns(1)
    await rig.until_done()
    [refused] = await events_of(bad)
    assert refused.error is not None
    assert (refused.error.status, refused.error.param, refused.error.code) == (400, "prompt", "why")
    assert (await events_of(good))[-1].usage is not None
    assert not rig.engine.live


async def test_a_job_that_breaks_the_output_stage_harms_no_other(rig: Rig, make_job: MakeJob) -> None:
    bad, good = await rig.gateway.open(make_job(stop=("",))), await rig.gateway.open(make_job())
    await rig.turns(1)
    await rig.until_done()
    [failed] = await events_of(bad)
    assert failed.error is not None
    assert failed.error.status == 500
    assert (await events_of(good))[-1].error is None


async def test_a_sequence_that_fails_in_the_engine_fails_its_job_alone(rig: Rig, make_job: MakeJob) -> None:
    rig.engine.failing = {"x"}
    bad, good = await rig.gateway.open(make_job(adapter="x", n=2)), await rig.gateway.open(make_job())
    while not rig.loop.busy:
        await rig.turns(1)
    await rig.until_done()
    events = await events_of(bad)
    assert events[0].deltas
    assert events[-1].error is not None
    assert (events[-1].error.status, events[-1].error.type) == (500, "server_error")
    assert "secret" not in events[-1].error.message
    assert [delta.finish_reason for event in events for delta in event.deltas if delta.finish_reason] == []
    assert (await events_of(good))[-1].usage is not None


async def test_an_engine_fault_fails_every_job_and_ends_the_worker(rig: Rig, make_job: MakeJob) -> None:
    streams = [await rig.gateway.open(make_job(max_tokens=100)) for _ in range(2)]
    await rig.turns(3)
    rig.engine.fault = RuntimeError("bit flip")
    with pytest.raises(RuntimeError):
        await rig.turns(1)
    for stream in streams:
        events = await events_of(stream)
        assert len(events) >= 3
        assert events[-1].error is not None
        assert "bit flip" not in events[-1].error.message
    assert not rig.loop.busy


async def test_adapters_are_fetched_while_others_compute(rig: Rig, make_job: MakeJob) -> None:
    base = await rig.gateway.open(make_job(max_tokens=500))
    grafted = await rig.gateway.open(make_job(adapter="x"))
    await rig.turns(1)
    assert {one.adapter for one in rig.engine.live.values()} == {None}
    while rig.loop.busy and "x" not in {one.adapter for one in rig.engine.live.values()}:
        await rig.turns(1)
    await events_of_after(rig, grafted)
    await base.cancel()
    await rig.until_done()
    assert (await events_of(base))[-1].deltas[-1].finish_reason == "abort"


async def events_of_after(rig: Rig, stream: JobStream) -> list[JobEvent]:
    """The events of a stream that ends while others go on."""
    while not stream.ended:
        await rig.turns(1)
    return await events_of(stream)


async def test_a_broken_adapter_fails_its_jobs_alone(rig: Rig, make_job: MakeJob) -> None:
    broken, fine = await rig.gateway.open(make_job(adapter="broken")), await rig.gateway.open(make_job(adapter="y"))
    await rig.turns(1)
    await rig.until_done()
    [failed] = await events_of(broken)
    assert failed.error is not None
    assert failed.error.status == 500
    assert "secret" not in failed.error.message
    assert failed.usage == Usage(prompt_tokens=0, cached_tokens=0, completion_tokens=0)
    assert (await events_of(fine))[-1].error is None


@pytest.mark.parametrize(
    ("digest", "status", "code"), [("damaged", 422, "invalid_adapter"), ("away", 503, "dependency_unavailable")]
)
async def test_an_adapter_that_cannot_be_read_fails_its_jobs_alone(
    rig: Rig, make_job: MakeJob, digest: str, status: int, code: str
) -> None:
    unread = await rig.gateway.open(msgspec.structs.replace(make_job(adapter=digest), adapter_name="tuned@v2"))
    fine, base = await rig.gateway.open(make_job(adapter="y")), await rig.gateway.open(make_job())
    await rig.turns(1)
    await rig.until_done()
    [failed] = await events_of(unread)
    assert failed.error is not None
    assert (failed.error.status, failed.error.code) == (status, code)
    assert "`tuned@v2`" in failed.error.message
    assert "secret" not in failed.error.message
    for stream in (fine, base):
        assert (await events_of(stream))[-1].error is None


async def test_more_adapters_than_memory_holds_take_turns(rig: Rig, make_job: MakeJob) -> None:
    streams = [await rig.gateway.open(make_job(adapter=f"x{number}")) for number in range(6)]
    await rig.turns(1)
    while not all(stream.ended for stream in streams):
        await rig.turns(1)
    for stream in streams:
        assert (await events_of(stream))[-1].error is None


async def test_no_more_is_claimed_than_there_is_room_for(rig: Rig, make_job: MakeJob) -> None:
    for _ in range(20):
        await rig.gateway.open(make_job(max_tokens=50))
    await rig.turns(2)
    assert len(rig.engine.live) == 8
    assert await rig.gateway.depth() == 12


async def test_draining_finishes_what_runs_and_gives_back_the_rest(rig: Rig, make_job: MakeJob) -> None:
    running = await rig.gateway.open(make_job(max_tokens=20))
    await rig.turns(1)
    waiting = await rig.gateway.open(make_job(adapter="x"))
    while await rig.gateway.depth():
        await rig.turns(1)
    await asyncio.to_thread(rig.loop.drain, time.monotonic() + 10)
    assert (await events_of(running))[-1].deltas[-1].finish_reason == "length"
    assert not waiting.ended
    assert await rig.gateway.depth() == 1


async def test_what_outlasts_the_drain_fails(rig: Rig, make_job: MakeJob) -> None:
    stream = await rig.gateway.open(make_job(max_tokens=10**6))
    await rig.turns(2)
    await asyncio.to_thread(rig.loop.drain, time.monotonic())
    last = (await events_of(stream))[-1]
    assert last.error is not None
    assert (last.error.status, last.error.code) == (503, "overloaded")
    assert not rig.engine.live


def test_a_step_that_hangs_shows_in_the_heartbeat(worker_queue: WorkerQueue) -> None:
    now = [100.0]
    vitals = Vitals("w", "m", clock=lambda: now[0])
    assert vitals.status().stalled_seconds == 0
    vitals.step_begins()
    now[0] += 42
    assert vitals.status().stalled_seconds == 42
    vitals.step_ends(ScriptedEngine())
    status = vitals.status()
    assert (status.stalled_seconds, status.steps, status.kv_blocks_total) == (0, 1, 10)
    assert status.step_seconds["forward"] == 0.5
    vitals.claimed(1.5)
    vitals.claimed(0.5)
    assert vitals.status().metrics["jobs_claimed_total"] == 2
    assert vitals.status().metrics["queue_wait_seconds_total"] == 2.0


async def test_the_heart_beats_beside_the_loop(valkey: str, rig: Rig) -> None:
    beating = WorkerQueue(valkey, "w", "m")
    heartbeat = Heartbeat(rig.vitals, beating.heartbeat, 0.02)
    heartbeat.start()
    rig.vitals.state = "ready"
    await asyncio.sleep(0.2)
    heartbeat.stop()
    beating.close()
    assert [(worker.model, worker.state) for worker in await rig.gateway.workers()] == [("m", "ready")]


async def test_an_adapter_whose_numbers_overflow_is_named(rig: Rig, make_job: MakeJob) -> None:
    rig.engine.failing, rig.engine.not_finite = {None, "x"}, True
    grafted = await rig.gateway.open(msgspec.structs.replace(make_job(adapter="x"), adapter_name="tuned@v2"))
    base = await rig.gateway.open(make_job())
    while not rig.loop.busy:
        await rig.turns(1)
    await rig.until_done()
    error = (await events_of(grafted))[-1].error
    assert error is not None
    assert (error.status, error.code, error.param) == (422, "invalid_adapter", "model")
    assert "`tuned@v2`" in error.message
    error = (await events_of(base))[-1].error
    assert error is not None
    assert (error.status, error.code) == (500, None)


async def test_an_adapter_that_is_wrong_is_422_with_all_that_is_wrong(rig: Rig, make_job: MakeJob) -> None:
    stream = await rig.gateway.open(msgspec.structs.replace(make_job(adapter="wrong"), adapter_name="tuned@v2"))
    await rig.turns(1)
    await rig.until_done()
    [event] = await events_of(stream)
    assert event.error is not None
    assert (event.error.status, event.error.code) == (422, "invalid_adapter")
    assert "`tuned@v2`" in event.error.message
    assert event.error.errors == (
        {"field": "r", "problem": "is too large", "hint": "smaller"},
        {"tensor": "q_proj.lora_A.weight", "problem": "is missing", "hint": ""},
    )


def test_loads_of_adapters_are_counted_by_how_long_they_took() -> None:
    vitals = Vitals("w", "m")
    for seconds in (0.004, 0.005, 0.3, 99.0):
        vitals.adapter_loaded(seconds)
    loads = vitals.status().adapter_loads
    assert dict(zip((*LOAD_SECONDS, None), loads.counts, strict=True)) == dict.fromkeys((*LOAD_SECONDS, None), 0) | {
        0.005: 2,
        0.5: 1,
        None: 1,
    }
    assert loads.seconds == pytest.approx(99.309)
