"""Runs a Batch: the decoder's forward pass, then tokens and scores from its hidden rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from torch import Tensor

from polygraft_engine.batch import Batch, Scored, one_group
from polygraft_engine.graphs import CapturableBackend, DecodeGraphs, DeviceCapture
from polygraft_engine.models.decoder import Decoder
from polygraft_engine.plan import Sampled
from polygraft_engine.sampler import Sampler, score
from polygraft_engine.tables import TableSlots
from polygraft_engine.types import TokenLogprob
from polygraft_kernels.api import KVCache, LoraGroups, StepTensors

SCORED_ROWS = 64
"""Prompt rows whose logits exist at once, so that scoring a long prompt takes little memory."""


class Runner:
    """The decoder, its KV caches, what adapters do to its tables, and the sampler."""

    def __init__(self, decoder: Decoder, tables: TableSlots, caches: Sequence[KVCache], sampler: Sampler) -> None:
        self._decoder = decoder
        self._tables = tables
        self._caches = tuple(caches)
        self._sampler = sampler
        self._graphs = _decode_graphs(decoder, self._caches)

    def forward(self, batch: Batch) -> Tensor:
        """One forward pass: hidden rows [T, K], good until the next one."""
        groups = batch.step.groups
        patched = self._tables.patches_embeddings(groups)
        if self._graphs is not None and not patched and self._graphs.cover(batch):
            return self._graphs.forward(batch)  # which embed tokens as the base does
        x = self._decoder.embed(batch.token_ids)
        if patched:
            self._tables.embed(x, batch.token_ids, groups)
        return self._decoder.forward(x, batch.step, self._caches)

    def sample(self, batch: Batch, hidden: Tensor) -> list[Sampled | None]:
        """One token per chunk of `batch.sampling`; None where the model's numbers are not finite."""
        if not batch.sampling:
            return []
        logits = self._logits(hidden[batch.sample_rows], batch.sample_groups)
        return self._sampler.sample(logits, [chunk.sequence for chunk in batch.sampling])

    def score(self, batch: Batch, hidden: Tensor) -> Iterator[tuple[Scored, list[TokenLogprob] | None]]:
        """Logprobs of the prompt tokens in `batch.scored`; None where the model's numbers are not finite."""
        for scored in batch.scored:
            entries: list[TokenLogprob] = []
            top = scored.chunk.sequence.generation.params.prompt_logprobs
            assert top is not None, "only sequences that ask are scored"
            for begin in range(0, len(scored.targets), SCORED_ROWS):
                targets = scored.targets[begin : begin + SCORED_ROWS]
                first = scored.first + begin
                logits = self._logits(hidden[first : first + len(targets)], one_group(scored.chunk.slot, len(targets)))
                entries.extend(score(logits, targets, [top] * len(targets)))
            yield scored, None if any(math.isnan(entry.logprob) for entry in entries) else entries

    def _logits(self, hidden: Tensor, groups: LoraGroups) -> Tensor:
        """float32 [R, V] from hidden rows [R, K], which `groups` are of."""
        return self._tables.logits(self._decoder.normed(hidden), self._decoder.head.linear, groups)


def _decode_graphs(decoder: Decoder, caches: tuple[KVCache, ...]) -> DecodeGraphs | None:
    """Where the backend and its device can capture them."""
    backend = decoder.backend
    if not isinstance(backend, CapturableBackend) or not backend.captures:
        return None

    def forward(token_ids: Tensor, step: StepTensors) -> Tensor:
        return decoder.forward(decoder.embed(token_ids), step, caches)

    return DecodeGraphs(forward, backend, caches[0].block_size, DeviceCapture())
