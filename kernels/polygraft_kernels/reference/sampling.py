"""Sampling rows of logits, each on its own."""

from __future__ import annotations

import torch
from torch import Tensor

from polygraft_kernels.api import SampleTensors
from polygraft_kernels.checks import check_sampling

GREEDY_BELOW = 1e-5
"""Temperatures below this take the largest logit."""


def sample(logits: Tensor, how: SampleTensors) -> Tensor:
    """`api.Backend.sample`: float32 [R, V] -> int64 [R].

    Probabilities are float64, so that the cumulated sum of a large vocabulary still resolves a float32 uniform.
    The nucleus is taken of what top_k left, renormalised, as transformers and vLLM do.
    """
    check_sampling(logits, how)
    chosen = logits.argmax(dim=-1)
    rows = (how.temperature >= GREEDY_BELOW).nonzero().squeeze(1)
    if rows.numel() == 0:
        return chosen
    p = (logits[rows].double() / how.temperature[rows].double().unsqueeze(1)).softmax(dim=-1)
    top_k, top_p, min_p = how.top_k[rows], how.top_p[rows].double(), how.min_p[rows].double()
    sorting = ((top_k > 0) | (top_p < 1)).nonzero().squeeze(1)
    if sorting.numel() > 0:
        p[sorting] = _keep_likeliest(p[sorting], top_k[sorting], top_p[sorting])
    p = p.masked_fill(p < (min_p * p.amax(dim=-1)).unsqueeze(1), 0.0)
    chosen[rows] = _invert_cdf(p, how.uniform[rows].double())
    return chosen


def _keep_likeliest(p: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """p [R, V] with all but the top_k likeliest, then all but their nucleus of mass top_p, set to zero."""
    likeliest, order = p.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(p.shape[1], device=p.device)
    limit = torch.where(top_k > 0, top_k, p.shape[1]).unsqueeze(1)
    likeliest = likeliest.masked_fill(rank >= limit, 0.0)
    mass = likeliest.cumsum(dim=-1)
    before = mass - likeliest
    outside = (before >= top_p.unsqueeze(1) * mass[:, -1:]) & (top_p < 1).unsqueeze(1) & (rank > 0)
    return torch.zeros_like(p).scatter_(1, order, likeliest.masked_fill(outside, 0.0))


def _invert_cdf(p: Tensor, uniform: Tensor) -> Tensor:
    """The first token at which the cumulated weight passes uniform times the whole; never one of weight zero."""
    cdf = p.cumsum(dim=-1)
    target = (uniform * cdf[:, -1]).unsqueeze(1)
    return torch.searchsorted(cdf, target, right=True).squeeze(1)
