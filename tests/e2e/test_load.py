"""Many clients at once: one batch, nobody's answer changed by a neighbour, nothing left behind."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from openai import AsyncOpenAI
from tests.e2e.server import Server

pytestmark = pytest.mark.slow

MODELS = ("SmolLM2-135M-Instruct", "json", "pirate", "french")
QUESTIONS = [
    f"Tell me about {thing}." for thing in ("tea", "the moon", "a bridge", "rain", "salt", "an owl", "ice", "chess")
]


async def answer(client: AsyncOpenAI, model: str, question: str) -> tuple[str, int]:
    """Text and completion tokens of one greedy answer."""
    reply = await client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": question}], temperature=0, max_tokens=24
    )
    assert reply.usage is not None
    return reply.choices[0].message.content or "", reply.usage.completion_tokens


def idle(server: Server) -> bool:
    """No request runs or waits, and no KV block is held by one."""
    busy = server.metric("polygraft_requests_running") + server.metric("polygraft_requests_waiting")
    return busy == 0 and server.metric("polygraft_kv_blocks_free") == server.metric("polygraft_kv_blocks")


async def test_forty_at_once_equal_the_same_alone(server: Server) -> None:
    work = [(MODELS[i % 4], QUESTIONS[i % 8]) for i in range(40)]
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key=server.api_key, max_retries=0, timeout=300) as client:
        together = await asyncio.gather(*(answer(client, *item) for item in work))
        alone = {item: await answer(client, *item) for item in dict.fromkeys(work)}
    assert together == [alone[item] for item in work]
    server.wait(lambda: idle(server))


async def test_clients_that_hang_up_free_everything(server: Server) -> None:
    body = {
        "model": "pirate",
        "messages": [{"role": "user", "content": "Tell me a very long story."}],
        "max_tokens": 1000,
        "ignore_eos": True,
        "stream": True,
    }

    async def hang_up(client: httpx.AsyncClient) -> None:
        async with client.stream("POST", "/v1/chat/completions", json=body) as stream:
            assert stream.status_code == 200
            async for line in stream.aiter_lines():
                if line.startswith("data:"):
                    return

    async def hang_up_unanswered(client: httpx.AsyncClient) -> None:
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/v1/chat/completions", json=body | {"stream": False}, timeout=0.5)

    before = server.metric("polygraft_sampled_tokens_total")
    async with httpx.AsyncClient(base_url=server.url, headers=server.headers(), timeout=120) as client:
        await asyncio.gather(*(hang_up(client) for _ in range(12)), *(hang_up_unanswered(client) for _ in range(8)))

    def settled() -> bool:
        # what was generated for those who left is counted all the same
        sampled = server.metric("polygraft_sampled_tokens_total")
        return before < sampled == server.metric("polygraft_completion_tokens_total") and idle(server)

    await asyncio.to_thread(server.wait, settled)


async def test_a_bad_request_harms_no_neighbour(server: Server) -> None:
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key=server.api_key, max_retries=0, timeout=300) as client:
        stream = await client.completions.create(
            model="json", prompt="Once", max_tokens=60, stream=True, temperature=0, extra_body={"ignore_eos": True}
        )
        pieces = 0
        async with httpx.AsyncClient(base_url=server.url, headers=server.headers()) as raw:
            async for _chunk in stream:
                pieces += 1
                bad = {"model": "json", "prompt": [[1, 2], [3, 5279552648203111001]], "max_tokens": 1}
                if pieces < 5:
                    assert (await raw.post("/v1/completions", json=bad)).status_code == 400
    assert pieces >= 5
