"""What a request does to its own logits before a token is drawn from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from polygraft_engine.types import SamplingParams


def changes_logits(params: SamplingParams, output_length: int) -> bool:
    """Whether `adjust` would do anything for a request that has generated `output_length` tokens."""
    return (
        params.repetition_penalty != 1.0
        or bool(params.logit_bias)
        or output_length < params.min_tokens
        or (output_length > 0 and (params.presence_penalty != 0.0 or params.frequency_penalty != 0.0))
    )


def adjust(
    logits: Tensor, params: SamplingParams, tokens: Sequence[int], prompt_length: int, eos_token_ids: Sequence[int]
) -> None:
    """Change one request's logits [V] in place; `tokens` is its prompt and what it has generated so far.

    In this order: the repetition penalty, which scales what the model said; presence and frequency penalties and
    logit_bias, which add to it; the ban of everything that would end the output before min_tokens.
    """
    output = tokens[prompt_length:]
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(tokens)), dtype=torch.int64, device=logits.device)
        said = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(said > 0, said / penalty, said * penalty)
    if output and (params.presence_penalty != 0.0 or params.frequency_penalty != 0.0):
        counts = Counter(output)
        ids = torch.tensor(list(counts), dtype=torch.int64, device=logits.device)
        times = torch.tensor(list(counts.values()), dtype=logits.dtype, device=logits.device)
        logits[ids] -= params.presence_penalty + params.frequency_penalty * times
    if params.logit_bias:
        biased = torch.tensor([token for token, _ in params.logit_bias], dtype=torch.int64, device=logits.device)
        amounts = torch.tensor([amount for _, amount in params.logit_bias], dtype=logits.dtype, device=logits.device)
        logits.index_add_(0, biased, amounts)
    if len(output) < params.min_tokens:
        banned = [*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)]
        logits[banned] = float("-inf")
