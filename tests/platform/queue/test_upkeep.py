"""What background work asks of the queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from polygraft.queue.gateway import GatewayQueue
from polygraft.queue.messages import Job
from polygraft.queue.worker import WorkerQueue


async def test_a_task_is_one_gateways_until_it_lets_go(valkey: str, gateway: GatewayQueue) -> None:
    other = await GatewayQueue.connect(valkey, "g2")
    assert await gateway.lease("sweep", 0.3)
    assert not await other.lease("sweep", 60)
    assert await gateway.lease("sweep", 0.3)
    assert await other.lease("dust", 60)
    await asyncio.sleep(0.4)
    assert await other.lease("sweep", 60)
    assert not await gateway.lease("sweep", 60)
    await other.close()


async def test_adapters_of_queued_and_running_jobs_are_in_use(
    gateway: GatewayQueue, worker: WorkerQueue, make_job: Callable[..., Job]
) -> None:
    assert await gateway.adapters_in_jobs() == set()
    for adapter in ("sha256:a", "sha256:b", None, "sha256:b"):
        await gateway.open(msgspec.structs.replace(make_job(), adapter=adapter))
    assert await gateway.adapters_in_jobs() == {"sha256:a", "sha256:b"}
    claimed = await asyncio.to_thread(worker.claim, 1, "nonce")
    assert [each.job.adapter for each in claimed] == ["sha256:a"]
    assert await gateway.adapters_in_jobs() == {"sha256:a", "sha256:b"}
