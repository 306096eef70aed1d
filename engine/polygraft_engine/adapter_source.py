"""Where the engine takes adapters from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from polygraft_adapters.weights import AdapterWeights
from polygraft_engine.types import EngineError


class AdapterSource(Protocol):
    """Adapters by digest, ready in host memory. Never asked for the base model."""

    def get(self, digest: str) -> AdapterWeights:
        """The adapter `digest`. Raises EngineError or AdapterError when it cannot be had."""
        ...


class DictSource:
    """An AdapterSource that holds what was put into it, for as long as it lives."""

    def __init__(self, adapters: Iterable[AdapterWeights] = ()) -> None:
        self._adapters = {weights.info.digest: weights for weights in adapters}

    def put(self, weights: AdapterWeights) -> str:
        """Hold `weights`; its digest."""
        self._adapters[weights.info.digest] = weights
        return weights.info.digest

    def get(self, digest: str) -> AdapterWeights:
        try:
            return self._adapters[digest]
        except KeyError:
            raise EngineError(f"no adapter has the digest {digest}") from None
