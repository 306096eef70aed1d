"""The engine's vocabulary, free of torch so that every process may import it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: they would overflow the softmax and mean the same."""

LOGPROB_FLOOR = -9999.0
"""Stands for minus infinity, which JSON cannot write."""


class EngineError(Exception):
    """Base of every error this package raises."""


class InvalidRequest(EngineError):
    """A request that can never be served as it is; `code` is OpenAI's error code where it has one."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request generates. Already validated and complete: every default has been filled in by whoever made it.

    Sources: OpenAI's API for the names it has, vLLM's for top_k, min_p, repetition_penalty, min_tokens,
    ignore_eos, stop_token_ids.
    """

    max_tokens: int
    """0 is allowed: the prompt is computed (and scored) and nothing is generated."""
    seed: int
    """int64; the uniform number of a token is f(seed, choice, position)."""
    n: int = 1
    min_tokens: int = 0
    """Neither end-of-sequence, stop tokens nor stop strings end the output before this many tokens."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    """Presence and frequency count generated tokens only (OpenAI)."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or the output (CTRL, Hugging Face)."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """None: none. k >= 0: the sampled token's logprob and those of the k likeliest tokens, from the raw
    distribution.
    """
    prompt_logprobs: int | None = None
    """As logprobs, for every prompt token but the first."""
    skip_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token's log probability (natural log, of the raw distribution: before penalties, temperature and masks)
    and the likeliest others. Finite, never below LOGPROB_FLOOR.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One sequence to generate: a prompt under one adapter. `n` choices are n Generations that differ in `choice`."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    adapter: str | None = None
    """The adapter's digest; None is the base model."""
    cache_namespace: str = ""
    """Prefix-cache blocks are shared only between equal (namespace, adapter)."""
    choice: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """What one step did for one Generation."""

    id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    """One per token of token_ids when asked for, else empty."""
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    """With the first output only, when asked for: one per prompt token from the second on."""
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache spared at the first admission."""
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    """The stop or end-of-sequence token that ended it, which is the last of token_ids; the text leaves it out
    unless include_stop.
    """
    error: str | None = None
    not_finite: bool = False
    """The error is that numbers overflowed, of which the weights are the cause and not this program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Sizes that bound a step and a request; names as vLLM's options."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    max_loras: int
    max_lora_rank: int
    prefix_caching: bool

    @property
    def max_context(self) -> int:
        """The longest a sequence may become, prompt and output together: the model's length or the whole pool."""
        return min(self.max_model_len, self.num_blocks * self.block_size)
