"""What the routes are handed: the observer and what it hears, seeds, who may call."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from polygraft.card import ModelCard
from polygraft.openai.chat import ChatRenderer
from polygraft.openai.inference import seed_source
from polygraft.queue.messages import AccessChange, ChoiceDelta, Job
from polygraft.tenancy.principal import Principal

from .conftest import PRINCIPAL, running_app
from .fakes import FakeWorker, Step, error_of

BODY = {"model": "pirate", "messages": [{"role": "user", "content": "hi"}]}
URL = "http://gateway/v1/chat/completions"


@dataclass
class Heard:
    """An observer that keeps what it is told."""

    times: dict[str, list[float]] = field(default_factory=dict)
    usages: list[tuple[str, int, int, int]] = field(default_factory=list)
    outcomes: list[tuple[str | None, int]] = field(default_factory=list)

    def first_token(self, model: str, seconds: float) -> None:
        self.times.setdefault("first_token", []).append(seconds)

    def inter_token(self, model: str, seconds: float) -> None:
        self.times.setdefault("inter_token", []).append(seconds)

    def end_to_end(self, model: str, seconds: float) -> None:
        self.times.setdefault("end_to_end", []).append(seconds)

    def added_latency(self, seconds: float) -> None:
        self.times.setdefault("added_latency", []).append(seconds)

    def tokens(self, model: str, prompt: int, cached: int, completion: int) -> None:
        self.usages.append((model, prompt, cached, completion))

    def outcome(self, model: str | None, status: int) -> None:
        self.outcomes.append((model, status))


async def test_the_observer_hears_of_every_call(
    valkey: str, cards: Mapping[str, ModelCard], tokenizers: Path, renderer: ChatRenderer, worker: FakeWorker
) -> None:
    heard = Heard()
    async with (
        running_app(valkey, cards, tokenizers, renderer, observer=heard) as app,
        httpx.AsyncClient(transport=httpx.ASGITransport(app=app)) as client,
    ):
        whole = (await client.post(URL, json=BODY)).json()
        streamed = await client.post(URL, json=BODY | {"stream": True})
        await client.post(URL, json=BODY | {"temperature": 3})
        await client.post(URL, json=BODY | {"model": "nope"})
    usage = whole["usage"]
    told = ("base", usage["prompt_tokens"], 1, usage["completion_tokens"])
    assert heard.usages == [told, told]
    assert heard.outcomes == [("base", 200), ("base", 200), (None, 400), (None, 404)]
    tokens = usage["completion_tokens"]
    assert len(heard.times["first_token"]) == 2
    assert len(heard.times["inter_token"]) == 2 * (tokens - 1)
    assert all(first <= end for first, end in zip(heard.times["first_token"], heard.times["end_to_end"], strict=True))
    assert streamed.status_code == 200
    assert len(heard.times["added_latency"]) >= tokens
    assert all(0 <= seconds < 10 for seconds in itertools.chain(*heard.times.values()))


def endless(job: Job) -> Iterator[Step]:
    """One token a step, until somebody ends it."""
    while True:
        yield (ChoiceDelta(index=0, text="x", token_ids=(5,)),)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("ending", "status"), [("revoked", 401), ("left", None)])
async def test_what_a_call_used_counts_though_it_was_not_answered_to_its_end(
    valkey: str, cards: Mapping[str, ModelCard], tokenizers: Path, renderer: ChatRenderer, worker: FakeWorker,
    stream: bool, ending: str, status: int | None,
) -> None:  # fmt: skip
    heard = Heard()
    worker.script, worker.pace = endless, 0.01
    async with (
        running_app(valkey, cards, tokenizers, renderer, observer=heard) as app,
        httpx.AsyncClient(transport=httpx.ASGITransport(app=app)) as client,
    ):
        call = asyncio.create_task(client.post(URL, json=BODY | {"stream": stream, "max_tokens": 200}))
        async with asyncio.timeout(10):
            while worker.steps <= 5:  # noqa: ASYNC110 - another thread counts them
                await asyncio.sleep(0.01)
            if ending == "left":
                call.cancel()
                await asyncio.gather(call, return_exceptions=True)
            else:
                app.state.admissions.apply(AccessChange(kind="key", id=PRINCIPAL.key_id, refusal="invalid_api_key"))
                await call
            while not heard.usages:  # noqa: ASYNC110 - the job's last event is still to come
                await asyncio.sleep(0.01)
    [(model, prompt, cached, completion)] = heard.usages
    assert (model, prompt > 0, cached) == ("base", True, 1)
    assert completion >= 5
    assert [outcome[1] for outcome in heard.outcomes] == ([] if status is None else [status])


async def test_an_operator_runs_no_models(
    valkey: str, cards: Mapping[str, ModelCard], tokenizers: Path, renderer: ChatRenderer
) -> None:
    operator = Principal("key_0", None, None, frozenset({"admin"}))
    async with (
        running_app(valkey, cards, tokenizers, renderer, principal=operator) as app,
        httpx.AsyncClient(transport=httpx.ASGITransport(app=app)) as client,
    ):
        answer = await client.post(URL, json=BODY)
    assert answer.status_code == 403
    assert error_of(answer.content)["type"] == "permission_error"


def test_seeds_repeat_only_when_told_to() -> None:
    first, second = seed_source(7), seed_source(7)
    drawn = [first() for _ in range(4)]
    assert drawn == [second() for _ in range(4)]
    assert len(set(drawn)) == 4
    assert all(0 <= seed < 2**63 for seed in drawn)
    assert seed_source()() != seed_source()()
