"""How a model rotates its queries and keys, as its config.json says it. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polygraft_engine.models.errors import UnsupportedModel

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary embedding parameters; names as in transformers' `rope_parameters`.

    kind "linear" divides every frequency by `factor`; "llama3" divides the long wavelengths and blends between
    `low_freq_factor` and `high_freq_factor`; "yarn" (arXiv 2309.00071) blends between `beta_fast` and `beta_slow`
    and scales cos and sin by `attention_factor`.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    """The context the model was trained on before it was stretched; llama3 and yarn only."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


def read_rope(config: Mapping[str, Any], max_position: int) -> RopeSpec:
    """The RopeSpec of a parsed config.json, in its new form (`rope_parameters`) or the old one (`rope_theta` beside
    `rope_scaling`).

    Raises UnsupportedModel for types or fields that would change the maths in ways we do not compute.
    """
    parameters = _parameters(config)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise UnsupportedModel(f"rope type {kind!r} is not supported; supported are {', '.join(ROPE_TYPES)}")
    partial = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise UnsupportedModel(f"partial_rotary_factor {partial} is not supported: whole heads are rotated")
    theta = parameters.get("rope_theta", config.get("rope_theta"))
    theta = 10000.0 if theta is None else float(theta)
    if kind == "default":
        return RopeSpec(theta=theta)
    original = config.get("original_max_position_embeddings", parameters.get("original_max_position_embeddings"))
    original = max_position if original is None else int(original)
    factor = parameters.get("factor")
    if factor is None and kind != "yarn":
        raise UnsupportedModel(f"rope type {kind!r} needs a factor, and config.json gives none")
    factor = max_position / original if factor is None else float(factor)
    if kind == "linear":
        return RopeSpec(theta=theta, kind=kind, factor=factor)
    if kind == "llama3":
        return RopeSpec(
            theta=theta,
            kind=kind,
            factor=factor,
            original_max_position=original,
            low_freq_factor=_number(parameters, "low_freq_factor", 1.0),
            high_freq_factor=_number(parameters, "high_freq_factor", 4.0),
        )
    return RopeSpec(
        theta=theta,
        kind=kind,
        factor=factor,
        original_max_position=original,
        beta_fast=_number(parameters, "beta_fast", 32.0),
        beta_slow=_number(parameters, "beta_slow", 1.0),
        truncate=bool(parameters.get("truncate", True)),
        attention_factor=_attention_factor(parameters, factor),
    )


def _parameters(config: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in ("rope_parameters", "rope_scaling"):
        found = config.get(name)
        if found is None:
            continue
        if not isinstance(found, Mapping):
            raise UnsupportedModel(f"{name} is {found!r}, not an object")
        if any(isinstance(value, Mapping) for value in found.values()):
            raise UnsupportedModel(f"{name} differs from layer to layer, which is not supported")
        return found
    return {}


def _number(parameters: Mapping[str, Any], name: str, default: float) -> float:
    value = parameters.get(name)
    return default if value is None else float(value)


def _attention_factor(parameters: Mapping[str, Any], factor: float) -> float:
    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)
    mscale, all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if mscale and all_dim:
        return _mscale(factor, float(mscale)) / _mscale(factor, float(all_dim))
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
