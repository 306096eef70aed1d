"""The engine without a server: prompts in, texts out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch

from polygraft_adapters.weights import load_adapter
from polygraft_engine.adapter_source import DictSource
from polygraft_engine.build import build_engine
from polygraft_engine.models.loading import Progress, no_progress
from polygraft_engine.models.tokenizer import load_tokenizer_files
from polygraft_engine.options import EngineOptions
from polygraft_engine.text import OutputStage
from polygraft_engine.types import (
    EngineError,
    FinishReason,
    Generation,
    InvalidRequest,
    SamplingParams,
    StepOutput,
    TokenLogprob,
)

Prompt = str | Sequence[int]
AdapterPath = str | Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One choice."""

    text: str
    """Without the stop, unless include_stop."""
    token_ids: tuple[int, ...]
    """Those whose text begins before the cut at a stop. A stop or end-of-sequence token is there only with
    include_stop.
    """
    logprobs: tuple[TokenLogprob, ...]
    """One per token when asked for, else empty."""
    completion_tokens: int
    """How many tokens were generated, those of the stop included."""
    finish_reason: FinishReason
    stop_reason: int | str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What one prompt yielded."""

    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: tuple[TokenLogprob, ...] | None
    cached_tokens: int
    choices: tuple[Completion, ...]
    """`n` of them."""

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The first choice's tokens."""
        return self.choices[0].token_ids


class LLM:
    """One base model and any adapters of it, in this process.

    llm = LLM("path/to/model")
    llm.generate(["Hello"], SamplingParams(max_tokens=8, seed=0), adapter="path/to/adapter")[0].text
    """

    def __init__(self, model: str | Path, *, on_progress: Progress = no_progress, **options: Any) -> None:
        """`options` are the fields of EngineOptions. Raises what `build_engine` raises."""
        self._source = DictSource()
        self.engine = build_engine(EngineOptions(model=str(model), **options), self._source, on_progress)
        self.tokenizer_files = load_tokenizer_files(self.engine.info.folder)
        self.tokenizer = self.tokenizer_files.tokenizer()
        self._modules = self.engine.spec.module_shapes(self.engine.info.folder.name)
        self._digests: dict[Path, str] = {}
        self._requests = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams],
        adapter: AdapterPath | Sequence[AdapterPath] = None,
    ) -> list[Output]:
        """Complete every prompt, all in one batch; one Output per prompt, in their order.

        A prompt is text or token ids; one may stand alone. `params` and `adapter` (a PEFT folder; None is the base
        model) hold for all prompts, or are lists with one entry per prompt. Raises InvalidRequest, AdapterError, and
        EngineError for a prompt that failed.
        """
        listed = _as_prompts(prompts)
        each_params = _per_prompt("params", params, len(listed), SamplingParams)
        adapters = _per_prompt("adapter", adapter, len(listed), (str, Path, type(None)))
        jobs = [
            _Job.start(self, prompt, one_params, one_adapter)
            for prompt, one_params, one_adapter in zip(listed, each_params, adapters, strict=True)
        ]
        choices = {choice.generation.id: choice for job in jobs for choice in job.choices}
        try:
            for choice in choices.values():
                self.engine.add(choice.generation)
            while self.engine.has_work:
                for output in self.engine.step():
                    if choices[output.id].push(output):
                        self.engine.cancel(output.id)
        finally:
            for id in choices:
                self.engine.cancel(id)
        return [job.output() for job in jobs]

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of a text, special tokens added as the tokenizer's own rules say; token ids stay as they are."""
        if isinstance(prompt, str):
            return tuple(self.tokenizer.encode(prompt).ids)
        return tuple(prompt)

    def load_adapter(self, path: str | Path) -> str:
        """Read a PEFT folder once; its digest. Raises AdapterError that lists what is wrong with it."""
        resolved = Path(path).resolve()
        if resolved not in self._digests:
            dtype = getattr(torch, self.engine.info.dtype)
            weights = load_adapter(resolved, self._modules, self.engine.limits.max_lora_rank, dtype)
            self._digests[resolved] = self._source.put(self.engine.prepare(weights))
        return self._digests[resolved]

    def next_id(self) -> str:
        """A name for one sequence, unique in this object."""
        self._requests += 1
        return f"offline-{self._requests}"


@dataclass(slots=True)
class _Choice:
    """One sequence under way."""

    generation: Generation
    stage: OutputStage
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    completion_tokens: int = 0

    def push(self, output: StepOutput) -> bool:
        """Take one step's output; True when a stop string ended it, which the engine does not know."""
        if output.error is not None:
            raise EngineError(output.error)
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        self.cached_tokens = output.cached_tokens
        delta = self.stage.push(output)
        self.text.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        self.completion_tokens = delta.completion_tokens
        return delta.finish_reason is not None and output.finish_reason is None

    def completion(self) -> Completion:
        assert self.finish_reason is not None, "the engine ran dry before this sequence ended"
        return Completion(
            text="".join(self.text),
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            completion_tokens=self.completion_tokens,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


@dataclass(frozen=True, slots=True)
class _Job:
    """One prompt and its choices."""

    prompt: tuple[int, ...]
    choices: tuple[_Choice, ...]

    @classmethod
    def start(cls, llm: LLM, prompt: Prompt, params: SamplingParams, adapter: AdapterPath) -> Self:
        ids = llm.encode(prompt)
        digest = None if adapter is None else llm.load_adapter(adapter)
        choices = [
            _Choice(
                Generation(id=llm.next_id(), prompt=ids, params=params, adapter=digest, choice=choice),
                OutputStage(llm.tokenizer, params, ids),
            )
            for choice in range(params.n)
        ]
        return cls(ids, tuple(choices))

    def output(self) -> Output:
        first = self.choices[0]
        return Output(
            prompt_token_ids=self.prompt,
            prompt_logprobs=first.prompt_logprobs,
            cached_tokens=first.cached_tokens,
            choices=tuple(choice.completion() for choice in self.choices),
        )


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    listed: list[Any] = list(prompts)
    if listed and all(isinstance(each, int) for each in listed):
        return [listed]
    return listed


def _per_prompt(name: str, given: Any, count: int, single: Any) -> list[Any]:
    if isinstance(given, single):
        return [given] * count
    listed = list(given)
    if len(listed) != count:
        raise InvalidRequest(f"{len(listed)} {name} were given for {count} prompts", param=name)
    return listed
