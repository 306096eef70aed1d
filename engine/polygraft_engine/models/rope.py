"""The rotary table every layer reads."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from polygraft_engine.models.rope_spec import RopeSpec


def rope_table(spec: RopeSpec, head_dim: int, positions: int) -> Tensor:
    """float32 [positions, 2, head_dim / 2]: cos, then sin, of position * frequency, times the attention factor."""
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), _frequencies(spec, head_dim))
    return torch.stack((angles.cos(), angles.sin()), dim=1) * spec.attention_factor


def _frequencies(spec: RopeSpec, head_dim: int) -> Tensor:
    """Radians per position, float32 [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / spec.theta**exponents
    if spec.kind == "linear":
        return plain / spec.factor
    if spec.kind == "llama3":
        return _llama3(plain, spec)
    if spec.kind == "yarn":
        return _yarn(plain, spec, head_dim)
    return plain


def _llama3(plain: Tensor, spec: RopeSpec) -> Tensor:
    """Short wavelengths stay, long ones are stretched by `factor`, those between are blended linearly in turns."""
    turns = spec.original_max_position * plain / (2 * math.pi)
    kept = ((turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)).clamp(0.0, 1.0)
    return kept * plain + (1.0 - kept) * plain / spec.factor


def _yarn(plain: Tensor, spec: RopeSpec, head_dim: int) -> Tensor:
    """As llama3, but blended linearly in the index of the dimension, between the two that turn beta_fast and
    beta_slow times over the original context.
    """
    low, high = (_dimension_turning(beta, spec, head_dim) for beta in (spec.beta_fast, spec.beta_slow))
    if spec.truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, head_dim - 1.0)
    width = high - low if high != low else 0.001
    stretched = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return (1.0 - stretched) * plain + stretched * plain / spec.factor


def _dimension_turning(times: float, spec: RopeSpec, head_dim: int) -> float:
    """The (fractional) dimension pair whose angle goes round `times` times over the original context."""
    return head_dim * math.log(spec.original_max_position / (times * 2 * math.pi)) / (2 * math.log(spec.theta))
