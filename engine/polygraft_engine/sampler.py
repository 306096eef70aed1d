"""From logits to tokens, every row on its own."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from polygraft_engine.penalties import adjust, changes_logits
from polygraft_engine.plan import Sampled
from polygraft_engine.randomness import uniform
from polygraft_engine.request import Sequence as Request
from polygraft_engine.types import GREEDY_BELOW, LOGPROB_FLOOR, SamplingParams, TokenLogprob
from polygraft_kernels.api import Backend, SampleTensors


class Sampler:
    """Draws one token per row, a function of the row's logits and its request alone; keeps nothing between calls."""

    def __init__(self, backend: Backend, eos_token_ids: Sequence[int]) -> None:
        self._backend = backend
        self._eos = tuple(eos_token_ids)

    def sample(self, logits: Tensor, requests: Sequence[Request]) -> list[Sampled | None]:
        """One token for each row of `logits` (float32 [R, V], left as it is), with its logprob when asked for.

        None stands for a row with NaN, with infinity or without any token left to draw: no answer can come of it.
        """
        adjusted = self._adjusted(logits, requests)
        greedy = [_is_greedy(request.generation.params) for request in requests]
        tokens = self._draw(adjusted, requests, greedy)
        logprobs = _logprobs(logits, requests, tokens)
        return [None if token is None else Sampled(token, logprobs.get(index)) for index, token in enumerate(tokens)]

    def _adjusted(self, logits: Tensor, requests: Sequence[Request]) -> Tensor:
        changed = [
            index
            for index, request in enumerate(requests)
            if changes_logits(request.generation.params, request.output_length)
        ]
        if not changed:
            return logits
        adjusted = logits.clone()
        for index in changed:
            request = requests[index]
            adjust(adjusted[index], request.generation.params, request.tokens, request.prompt_length, self._eos)
        return adjusted

    def _draw(self, logits: Tensor, requests: Sequence[Request], greedy: Sequence[bool]) -> list[int | None]:
        likeliest, peaks = _likeliest(logits)
        tokens: list[int | None] = [
            token if math.isfinite(peak) else None for token, peak in zip(likeliest, peaks, strict=True)
        ]
        rows = [index for index, token in enumerate(tokens) if token is not None and not greedy[index]]
        if rows:
            chosen = logits if len(rows) == len(requests) else logits[rows]
            how = _sample_tensors([requests[index] for index in rows], logits)
            drawn: list[int] = self._backend.sample(chosen, how).tolist()
            for index, token in zip(rows, drawn, strict=True):
                tokens[index] = token
        return tokens


def score(logits: Tensor, token_ids: Sequence[int], tops: Sequence[int]) -> list[TokenLogprob]:
    """Per row of raw logits (float32 [R, V]): the log probability of its token and the tops[r] likeliest tokens."""
    logprobs = torch.log_softmax(logits, dim=-1).clamp_min(LOGPROB_FLOOR)
    own = logprobs.gather(1, torch.tensor(token_ids, device=logits.device).unsqueeze(1)).squeeze(1).tolist()
    most = min(max(tops), logits.shape[1])
    if most == 0:
        return [TokenLogprob(token, logprob) for token, logprob in zip(token_ids, own, strict=True)]
    values, ids = (each.tolist() for each in logprobs.topk(most, dim=-1))
    return [
        TokenLogprob(token, logprob, tuple(zip(top_ids[:top], top_values[:top], strict=True)))
        for token, logprob, top_ids, top_values, top in zip(token_ids, own, ids, values, tops, strict=True)
    ]


def _logprobs(logits: Tensor, requests: Sequence[Request], tokens: Sequence[int | None]) -> dict[int, TokenLogprob]:
    """By row, for the rows that ask."""
    rows: list[int] = []
    chosen: list[int] = []
    tops: list[int] = []
    for index, (request, token) in enumerate(zip(requests, tokens, strict=True)):
        top = request.generation.params.logprobs
        if top is not None and token is not None:
            rows.append(index)
            chosen.append(token)
            tops.append(top)
    return dict(zip(rows, score(logits[rows], chosen, tops), strict=True)) if rows else {}


def _is_greedy(params: SamplingParams) -> bool:
    """Whether every draw takes the likeliest token."""
    return params.temperature < GREEDY_BELOW or params.top_k == 1 or params.top_p == 0.0


def _likeliest(logits: Tensor) -> tuple[list[int], list[float]]:
    """Per row the lowest index among the largest logits, and that logit; NaN counts as largest."""
    if logits.is_cpu:
        # numpy's argmax is vectorised where torch's is not: 0.14 ms against 3.5 ms for 16 rows of 49152
        host = logits.numpy()
        tokens = host.argmax(axis=-1)
        return tokens.tolist(), np.take_along_axis(host, tokens[:, None], axis=-1)[:, 0].tolist()
    peaks, indices = logits.max(dim=-1)
    return indices.tolist(), peaks.tolist()


def _sample_tensors(requests: Sequence[Request], logits: Tensor) -> SampleTensors:
    params = [request.generation.params for request in requests]
    vocab = logits.shape[1]

    def floats(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=logits.device)

    return SampleTensors(
        temperature=floats([each.temperature for each in params]),
        top_k=torch.tensor([min(max(each.top_k, 0), vocab) for each in params], device=logits.device),
        top_p=floats([each.top_p for each in params]),
        min_p=floats([each.min_p for each in params]),
        uniform=floats(
            [
                uniform(each.seed, request.generation.choice, request.output_length)
                for each, request in zip(params, requests, strict=True)
            ]
        ),
    )
