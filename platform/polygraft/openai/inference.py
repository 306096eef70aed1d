"""What the OpenAI routes work with, handed to them whole."""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from polygraft.openai.catalog import ModelCatalog
from polygraft.openai.chat import ChatRenderer
from polygraft.queue.gateway import GatewayQueue
from polygraft.registry.types import ModelResolver

SeedSource = Callable[[], int]
"""Draws the seed of a request that has none: an int64 that is not negative."""


def seed_source(seed: int | None = None) -> SeedSource:
    """Seeds from the system's generator, or, to repeat a whole run, from `seed`."""
    if seed is None:
        return lambda: secrets.randbits(63)
    source = random.Random(seed)
    return lambda: source.getrandbits(63)


class Observer(Protocol):
    """What the gateway's metrics are told. `model` is the base model; times are seconds."""

    def first_token(self, model: str, seconds: float) -> None:
        """From the request's arrival to its first token."""

    def inter_token(self, model: str, seconds: float) -> None:
        """Between two arrivals of tokens of one call."""

    def end_to_end(self, model: str, seconds: float) -> None:
        """From the request's arrival to the end of its answer."""

    def added_latency(self, seconds: float) -> None:
        """From the end of the engine's step to the write of its tokens on the socket."""

    def tokens(self, model: str, prompt: int, cached: int, completion: int) -> None:
        """The usage of one call that has ended."""

    def outcome(self, model: str | None, status: int) -> None:
        """How a call ended: an HTTP status, 499 if the client left. No model: refused before it was queued."""


@dataclass(frozen=True, slots=True)
class Inference:
    """The queue, the registry and the models, for the routes."""

    queue: GatewayQueue
    resolver: ModelResolver
    catalog: ModelCatalog
    """The owner of the Inference closes it, and the renderer."""
    gateway_id: str
    observer: Observer
    renderer: ChatRenderer = field(default_factory=ChatRenderer)
    seeds: SeedSource = field(default_factory=seed_source)
    keep_alive: float = 10.0
    """Seconds of silence after which a stream carries a comment."""

    def close(self) -> None:
        """End what was started for templates and texts."""
        self.renderer.close()
        self.catalog.close()
