"""Request bodies to the engine's complete sampling parameters."""

from __future__ import annotations

from collections.abc import Sequence

from polygraft.card import ModelCard
from polygraft.errors import bad_request
from polygraft.openai.prompts import Prompt, check_ids, fit_context
from polygraft.openai.schemas import ChatBody, CompletionBody, SamplingBody
from polygraft_engine.types import SamplingParams

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for /v1/completions; a chat may fill the context."""


def chat_params(body: ChatBody, card: ModelCard, prompt: Prompt, seed: int) -> SamplingParams:
    """How to answer a chat. Raises ApiError 400."""
    wanted = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    max_tokens = fit_context(card, [prompt], wanted, None, "messages")
    return _params(body, card, seed, max_tokens, body.top_logprobs if body.logprobs else None, None)


def completion_params(body: CompletionBody, card: ModelCard, prompts: Sequence[Prompt], seed: int) -> SamplingParams:
    """How to continue prompts; with echo, logprobs cover the prompt too. Raises ApiError 400."""
    max_tokens = fit_context(card, prompts, body.max_tokens, DEFAULT_COMPLETION_TOKENS, "prompt")
    return _params(body, card, seed, max_tokens, body.logprobs, body.logprobs if body.echo else None)


def _params(
    body: SamplingBody,
    card: ModelCard,
    seed: int,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    check_ids(list(body.logit_bias), card, "logit_bias")
    check_ids(body.stop_token_ids, card, "stop_token_ids")
    if body.min_tokens > max_tokens:
        raise bad_request(
            f"`min_tokens` is {body.min_tokens}, more than the {max_tokens} tokens that may be generated.",
            param="min_tokens",
        )
    return SamplingParams(
        max_tokens=max_tokens,
        seed=seed,
        n=body.n,
        min_tokens=body.min_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        # more than the vocabulary is the vocabulary, and -1 is vLLM's word for off
        top_k=max(0, min(body.top_k, card.vocab_size)),
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=tuple(body.logit_bias.items()),
        stop=body.stop,
        include_stop=body.include_stop_str_in_output,
        stop_token_ids=tuple(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        skip_special_tokens=body.skip_special_tokens,
    )
