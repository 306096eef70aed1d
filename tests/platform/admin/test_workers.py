"""/admin/v1/workers over HTTP."""

from typing import Any

import httpx

from polygraft.registry.live import LiveModels


async def test_workers_are_shown_as_their_heartbeats_tell(operator: httpx.AsyncClient) -> None:
    answer = (await operator.get("/admin/v1/workers")).json()
    assert answer == {
        "object": "list",
        "data": [
            {
                "id": "worker-1", "object": "worker", "pid": 1, "host": "h", "model": "base", "state": "ready",
                "running": 2, "waiting": 1, "kv_blocks_total": 8, "kv_blocks_free": 6,
                "resident_adapters": ["sha256:a"], "last_seen": 0.0,
            }
        ],
    }  # fmt: skip


async def test_a_queue_that_is_away_is_503(operator: httpx.AsyncClient, directory: Any, live: LiveModels) -> None:
    directory.away = True
    await live.refresh()
    refused = await operator.get("/admin/v1/workers")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "dependency_unavailable")
    assert "retry-after" in refused.headers
