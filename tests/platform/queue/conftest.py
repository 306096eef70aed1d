"""Jobs, and both ends of the queue."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from polygraft.card import ModelCard
from polygraft.queue.gateway import GatewayQueue, JobStream
from polygraft.queue.limits import QueueLimits
from polygraft.queue.messages import ChoiceDelta, Job, JobEvent, Usage, WorkerStatus
from polygraft.queue.worker import ClaimedJob, Emission, WorkerQueue
from polygraft_adapters.types import ModuleShapes
from polygraft_engine.types import SamplingParams

MODEL = "a-base-model-with-a-name-longer-than-thirty-two-characters"

FAST = QueueLimits(
    max_queued=8,
    lease=0.5,
    worker_ttl=0.4,
    gateway_ttl=0.4,
    beat=0.05,
    quiet=0.2,
    outage=2.0,
    max_wait=30.0,
    record_ttl=10.0,
)


def status_of(worker: str, state: str = "ready") -> WorkerStatus:
    return WorkerStatus(
        id=worker,
        pid=1,
        host="h",
        model=MODEL,
        state=state,
        running=0,
        waiting=0,
        kv_blocks_total=10,
        kv_blocks_free=10,
        resident_adapters=(),
        last_seen=time.time(),
        stalled_seconds=0.0,
    )


def card_of(**changes: object) -> ModelCard:
    fields: dict[str, object] = {
        "name": MODEL,
        "created": 5,
        "max_model_len": 128,
        "max_context": 64,
        "vocab_size": 100,
        "eos_token_ids": (2,),
        "bos_token": None,
        "eos_token": "</s>",
        "chat_template": None,
        "tokenizer": "sha256:00",
        "modules": ModuleShapes(layers=2, shapes={"q_proj": (8, 8)}, base_model="tiny"),
        "max_loras": 4,
        "max_lora_rank": 16,
        "numerics_id": "ref",
    }
    return ModelCard(**(fields | changes))


@pytest.fixture
def limits() -> QueueLimits:
    return FAST


@pytest.fixture
async def gateway(valkey: str, limits: QueueLimits) -> AsyncIterator[GatewayQueue]:
    queue = await GatewayQueue.connect(valkey, "g1", limits)
    yield queue
    await queue.close()


@pytest.fixture
def worker(valkey: str, limits: QueueLimits) -> Iterator[WorkerQueue]:
    """A worker whose heartbeat outlives the test."""
    patient = QueueLimits(lease=limits.lease, worker_ttl=60.0, outage=limits.outage, max_wait=limits.max_wait)
    queue = WorkerQueue(valkey, "w1", MODEL, patient)
    queue.register(card_of(), status_of("w1"))
    yield queue
    queue.close()


@pytest.fixture
def make_job() -> Callable[..., Job]:
    numbers = itertools.count()

    def make(tenant: str = "t1", gateway: str = "g1", n: int = 1, deadline: float | None = None) -> Job:
        return Job(
            id=f"job-{next(numbers)}",
            model=MODEL,
            tenant=tenant,
            gateway=gateway,
            adapter=None,
            prompts=((1, 2, 3),),
            params=SamplingParams(max_tokens=4, seed=1, n=n),
            cache_namespace=tenant,
            submitted_at=time.time(),
            deadline=deadline,
        )

    return make


def emit(claimed: ClaimedJob, seq: int, *, text: str = "x", final: bool = False) -> Emission:
    event = JobEvent(
        job=claimed.job.id,
        seq=seq,
        deltas=(ChoiceDelta(index=0, text=text, token_ids=(seq,), finish_reason="stop" if final else None),),
        usage=Usage(prompt_tokens=3, cached_tokens=0, completion_tokens=seq + 1) if final else None,
    )
    return Emission(claimed.job.id, claimed.attempt, event)


async def read_all(stream: JobStream) -> list[JobEvent]:
    return [arrived.event async for arrived in stream]
