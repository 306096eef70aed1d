"""Puts a load on a server: closed loops or Poisson arrivals, over adapters of a given popularity."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from polygraft.bench.client import BenchError, Client
from polygraft.bench.prompts import PromptSource

Popularity = Literal["single", "uniform", "zipf"]


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of the server."""

    model: str
    prompt: str


@dataclass(slots=True)
class Outcome:
    """What came of a request. Moments are time.perf_counter()."""

    model: str
    began: float
    ended: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    """Of every event that carried text."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Choice(msgspec.Struct):
    text: str = ""


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: dict[str, object] | None = None


_decode = msgspec.json.Decoder(_Chunk).decode


def choose_models(models: Sequence[str], popularity: Popularity, seed: int) -> Iterator[str]:
    """The model of each request. single: the first one. zipf: the k-th has a share proportional to 1/k."""
    rng = random.Random(seed)
    if popularity == "single":
        weights = [1.0] + [0.0] * (len(models) - 1)
    elif popularity == "uniform":
        weights = [1.0] * len(models)
    else:
        weights = [1.0 / rank for rank in range(1, len(models) + 1)]
    while True:
        yield rng.choices(models, weights)[0]


def make_requests(count: int, models: Iterator[str], prompts: PromptSource, first: int = 0) -> list[Request]:
    """`count` requests with prompts from number `first` on."""
    return [Request(next(models), prompts.prompt(first + number)) for number in range(count)]


class Load:
    """Sends requests and records what comes back."""

    def __init__(self, client: Client, output_tokens: int, on_done: Callable[[], None] = lambda: None) -> None:
        self._client = client
        self._output_tokens = output_tokens
        self._on_done = on_done

    async def closed_loop(self, requests: Sequence[Request], concurrency: int) -> list[Outcome]:
        """`concurrency` clients, each of which sends its next request when its last one has ended."""
        waiting = iter(requests)

        async def one_client() -> list[Outcome]:
            return [await self.send(request) for request in waiting]

        found = await asyncio.gather(*(one_client() for _ in range(concurrency)))
        return [outcome for outcomes in found for outcome in outcomes]

    async def poisson(self, requests: Sequence[Request], rate: float, seed: int) -> list[Outcome]:
        """Independent arrivals, `rate` a second on average, whatever the server makes of them."""
        rng = random.Random(seed)
        due = time.perf_counter()
        running: list[asyncio.Task[Outcome]] = []
        for request in requests:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            running.append(asyncio.create_task(self.send(request)))
            due += rng.expovariate(rate)
        return await asyncio.gather(*running)

    async def send(self, request: Request) -> Outcome:
        """One streamed completion of exactly `output_tokens` tokens."""
        outcome = Outcome(request.model, time.perf_counter())

        def on_event(data: bytes, arrived: float) -> None:
            if data == b"[DONE]":
                return
            chunk = _decode(data)
            if chunk.error is not None:
                outcome.error = str(chunk.error.get("message"))
            elif chunk.usage is not None:
                details = chunk.usage.prompt_tokens_details
                outcome.prompt_tokens = chunk.usage.prompt_tokens
                outcome.output_tokens = chunk.usage.completion_tokens
                outcome.cached_tokens = 0 if details is None else details.cached_tokens
            elif any(choice.text for choice in chunk.choices):
                outcome.arrivals.append(arrived)

        body = {
            "model": request.model,
            "prompt": request.prompt,
            "max_tokens": self._output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            await self._client.post("/v1/completions", msgspec.json.encode(body), on_event)
        except BenchError as error:
            outcome.error = str(error)
        outcome.ended = time.perf_counter()
        if outcome.error is None and outcome.output_tokens == 0:
            outcome.error = "the stream ended without usage"
        self._on_done()
        return outcome
