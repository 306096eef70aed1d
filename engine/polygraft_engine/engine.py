"""The engine: add · cancel · step. One thread drives it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from polygraft_adapters.types import AdapterError
from polygraft_adapters.weights import AdapterWeights
from polygraft_engine.adapter_source import AdapterSource
from polygraft_engine.batch import build_batch
from polygraft_engine.lora import AdapterBanks
from polygraft_engine.models.architecture import ModelSpec
from polygraft_engine.models.decoder import Decoder
from polygraft_engine.plan import Chunk, Plan, Sampled
from polygraft_engine.prepared import PreparedAdapter
from polygraft_engine.preparing import Preparer
from polygraft_engine.runner import Runner
from polygraft_engine.sampler import Sampler
from polygraft_engine.scheduler import Scheduler
from polygraft_engine.scores import PromptScores
from polygraft_engine.stats import EngineStats, StepPhases, Stopwatch
from polygraft_engine.types import EngineError, EngineLimits, Generation, InvalidRequest, StepOutput

logger = logging.getLogger(__name__)

_NOT_FINITE = "the model computed numbers that are not finite for this request; no answer can come of it"
_SKIPPED = Sampled(0, None)
"""Stands for the token of a sequence that failed during the step; the scheduler skips it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What was loaded, and what computes it."""

    folder: Path
    backend: str
    passed_over: tuple[str, ...]
    """Why faster backends were not chosen."""
    dtype: str
    numerics_id: str
    """Engines with equal ids compute equal outputs."""


class Engine:
    """Prompts in, tokens out; owns the scheduler, the adapter banks and the KV caches.

    `step` never raises for a request's sake: a sequence that cannot go on ends with an `error` output, and the others
    go on.
    """

    def __init__(
        self,
        decoder: Decoder,
        banks: AdapterBanks,
        preparer: Preparer,
        limits: EngineLimits,
        adapters: AdapterSource,
        info: EngineInfo,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert limits.max_model_len <= decoder.max_positions, "the rotary table is shorter than the context"
        eos = decoder.spec.eos_token_ids
        self._decoder = decoder
        self._banks = banks
        self._preparer = preparer
        self._limits = limits
        self._adapters = adapters
        self._info = info
        self._scheduler = Scheduler(limits, frozenset(eos), clock)
        caches = decoder.kv_caches(limits.num_blocks, limits.block_size)
        self._runner = Runner(decoder, banks.tables, caches, Sampler(decoder.backend, eos))
        self._scores = PromptScores()
        self._forward_passes = 0
        self._computed_tokens = 0
        self._sampled_tokens = 0
        self._failed_steps = 0
        self._all_steps = StepPhases()
        self._last_step = StepPhases()

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    @property
    def spec(self) -> ModelSpec:
        return self._decoder.spec

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return self._scheduler.has_work

    def add(self, generation: Generation) -> None:
        """Queue a sequence; its outputs come from `step`. Raises InvalidRequest for what can never be served."""
        self._validate(generation)
        self._scheduler.add(generation)

    def cancel(self, id: str) -> bool:
        """End a sequence without further outputs and free what it holds; False when it is not live."""
        self._scores.drop(id)
        return self._scheduler.cancel(id)

    def prepare(self, weights: AdapterWeights) -> PreparedAdapter:
        """`weights` as the slots take them, packed for this model: for an AdapterSource to hold in their place.

        The one method that may run on any thread, beside `step`. An adapter that a source gives out unprepared is
        prepared between steps, which wait. Raises KernelError or MemoryError when it cannot be.
        """
        return self._preparer(weights)

    def drop_adapter(self, digest: str) -> bool:
        """Forget an adapter that no running sequence uses; False when it is not in a slot, or in use."""
        return self._scheduler.drop_adapter(digest)

    def flush_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        self._scheduler.flush_prefix_cache()

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """Compute the next batch in one forward pass. At most one output per live sequence; empty without work."""
        watch = Stopwatch()
        plan = self._scheduler.schedule()
        if not plan.chunks:
            return []
        watch.lap("schedule")
        outputs = self._load_adapters(plan)
        watch.lap("load")
        failed = {output.id for output in outputs}
        chunks = [chunk for chunk in plan.chunks if chunk.id not in failed]
        try:
            sampled = self._compute(chunks, watch)
        except Exception as error:
            logger.exception("a step of %d sequences failed", len(chunks))
            self._failed_steps += 1
            ids = [chunk.id for chunk in chunks]
            return outputs + self._fail(ids, f"the step that computed this request failed: {error}")
        overflowed = self._fail([id for id, token in sampled.items() if token is None], _NOT_FINITE)
        outputs += [replace(output, not_finite=True) for output in overflowed]
        outputs += self._commit(plan, sampled)
        watch.lap("commit")
        self._last_step = watch.phases()
        self._all_steps += self._last_step
        return outputs

    def stats(self) -> EngineStats:
        return EngineStats(
            scheduler=self._scheduler.stats(),
            forward_passes=self._forward_passes,
            computed_tokens=self._computed_tokens,
            sampled_tokens=self._sampled_tokens,
            failed_steps=self._failed_steps,
            all_steps=self._all_steps,
            last_step=self._last_step,
        )

    def check(self) -> None:
        """Assert every owner's invariants."""
        self._scheduler.check()
        self._banks.check()
        if not self.has_work:
            self._scores.check_empty()

    def _load_adapters(self, plan: Plan) -> list[StepOutput]:
        """Write what the step needs into its slots. Sequences whose adapter cannot be loaded fail, and only they."""
        outputs: list[StepOutput] = []
        for load in plan.loads:
            try:
                self._banks.load(load.slot, self.prepare(self._adapters.get(load.digest)))
            except Exception as error:
                logger.exception("adapter %s could not be loaded", load.digest)
                users = [chunk.id for chunk in plan.chunks if chunk.slot == load.slot]
                outputs += self._fail(users, f"the adapter {load.digest} could not be loaded: {error}")
            else:
                self._scheduler.written(load)
        return outputs

    def _compute(self, chunks: Sequence[Chunk], watch: Stopwatch) -> dict[str, Sampled | None]:
        """The tokens drawn, by sequence; None for a sequence whose numbers are not finite."""
        if not chunks:
            return {}
        batch = build_batch(chunks, self._limits.block_size, self._decoder.backend.device)
        watch.lap("batch")
        hidden = self._runner.forward(batch)
        self._forward_passes += 1
        self._computed_tokens += batch.rows
        watch.lap("forward")
        tokens = self._runner.sample(batch, hidden)
        sampled = {chunk.id: token for chunk, token in zip(batch.sampling, tokens, strict=True)}
        for scored, entries in self._runner.score(batch, hidden):
            if entries is None:
                sampled[scored.chunk.id] = None
            else:
                self._scores.add(scored.chunk.id, scored.chunk.start, entries)
        watch.lap("sample")
        return sampled

    def _fail(self, ids: Sequence[str], message: str) -> list[StepOutput]:
        for id in ids:
            self._scores.drop(id)
        return self._scheduler.fail(ids, message)

    def _commit(self, plan: Plan, sampled: dict[str, Sampled | None]) -> list[StepOutput]:
        tokens = [sampled.get(chunk.id) for chunk in plan.chunks if chunk.samples]
        outputs = self._scheduler.commit(plan, [_SKIPPED if token is None else token for token in tokens])
        self._sampled_tokens += sum(token is not None for token in tokens)
        return [
            output if (scores := self._scores.pop(output.id)) is None else replace(output, prompt_logprobs=scores)
            for output in outputs
        ]

    def _validate(self, generation: Generation) -> None:
        vocab, params = self.spec.vocab, generation.params
        _check_ids("prompt", generation.prompt, vocab)
        _check_ids("stop_token_ids", params.stop_token_ids, vocab)
        _check_ids("logit_bias", [token for token, _ in params.logit_bias], vocab)
        if not all(math.isfinite(amount) for _, amount in params.logit_bias):
            raise InvalidRequest("logit_bias holds an amount that is not a finite number", param="logit_bias")
        if generation.adapter is not None:
            self._check_adapter(generation.adapter)

    def _check_adapter(self, digest: str) -> None:
        try:
            rank = self._adapters.get(digest).info.rank
        except (EngineError, AdapterError) as error:
            raise InvalidRequest(f"the adapter {digest} cannot be used: {error}", param="model") from error
        if rank > self._limits.max_lora_rank:
            raise InvalidRequest(
                f"the adapter {digest} has rank {rank}, and this engine serves ranks up to "
                f"{self._limits.max_lora_rank}",
                param="model",
            )


def _check_ids(param: str, ids: Sequence[int], vocab: int) -> None:
    if ids and (min(ids) < 0 or max(ids) >= vocab):
        wrong = next(token for token in ids if not 0 <= token < vocab)
        raise InvalidRequest(f"{param} holds token id {wrong}; ids are 0 to {vocab - 1}", param=param)
