"""adapter_config.json, read as PEFT reads it (peft 0.21, `LoraConfig`): what matters to the maths, and what we refuse.

The tensors in the file are the truth about which modules an adapter touches. target_modules, exclude_modules,
layers_to_transform and layers_pattern only say what training aimed at; they are checked for their types, and a list
of target_modules is compared with the tensors for a warning.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar

from polygraft_adapters.patterns import Patterns, compile_patterns
from polygraft_adapters.types import TABLES, Problem
from polygraft_adapters.unsupported import other_method, unsupported_fields
from polygraft_adapters.wording import said, shown

CONFIG_NAME = "adapter_config.json"
MAX_CONFIG_BYTES = 8 * 1024 * 1024
MAX_RANK = 2**31 - 1
MAX_SCALE = 3.4e38
"""What float32 holds; kernels take the scale as a float32."""

BIASES = ("none", "all", "lora_only")
"""What `bias` can be: which biases of the base were trained."""

_DEFAULT_R = 8
_DEFAULT_ALPHA = 8
_T = TypeVar("_T")


class _Wrong(Exception):
    """A value that a field cannot have; the text continues "r "."""


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """The fields that change what an adapter computes, and the two that are worth a warning."""

    r: int
    alpha: float
    use_rslora: bool
    rank_pattern: Patterns[int]
    alpha_pattern: Patterns[float]
    use_dora: bool
    target_modules: tuple[str, ...] | None
    """None where the config gives no list: nothing to compare the tensors with."""
    base_model: str | None
    lora_bias: bool = False
    bias: str = "none"
    saved: tuple[str, ...] = ()
    """The tables, embed_tokens and lm_head, that modules_to_save names."""
    ensure_weight_tying: bool = False
    """Where the base ties its tables, so does the adapter."""
    tokens: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: MappingProxyType({}))
    """By table, the ids of trainable_token_indices in the order of the retrained rows."""

    def rank(self, module: str) -> int:
        """The rank of a module, by its dotted name within the base model (`model.layers.0.self_attn.q_proj`)."""
        return self.rank_pattern.value(module, self.r)

    def scale(self, module: str) -> float:
        """alpha / r, or alpha / sqrt(r) with use_rslora, with the module's own rank and alpha."""
        return self._scale(self.alpha_pattern.value(module, self.alpha), self.rank(module))

    @property
    def default_scale(self) -> float:
        """The scale of a module that no pattern matches."""
        return self._scale(self.alpha, self.r)

    def _scale(self, alpha: float, rank: int) -> float:
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


def parse_config(raw: bytes) -> tuple[LoraSettings | None, list[Problem]]:
    """The settings, and every problem of the config: fields with impossible values and features that are not served.

    Settings are None when a field that the maths needs is impossible; then at least one problem says so.
    """
    try:
        config = json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        return None, [Problem(CONFIG_NAME, f"is not valid JSON: {shown(str(error))}")]
    if not isinstance(config, dict):
        return None, [Problem(CONFIG_NAME, "is not a JSON object")]
    if (other := other_method(config)) is not None:
        return None, [other]  # what its fields and tensors lack of LoRA's would say nothing
    reader = _Reader(config)
    r = reader.read("r", _DEFAULT_R, _rank)
    alpha = reader.read("lora_alpha", float(_DEFAULT_ALPHA), _alpha)
    use_rslora = reader.read("use_rslora", False, _boolean)
    ranks = reader.read("rank_pattern", _rank_patterns({}), _rank_patterns)
    alphas = reader.read("alpha_pattern", _alpha_patterns({}), _alpha_patterns)
    use_dora = reader.read("use_dora", False, _boolean)
    targets = reader.read("target_modules", None, _targets)
    base_model = reader.read("base_model_name_or_path", None, _string)
    lora_bias = reader.read("lora_bias", False, _boolean)
    bias = reader.read("bias", "none", _bias)
    saved = reader.read("modules_to_save", _saved([]), _saved)
    tying = reader.read("ensure_weight_tying", False, _boolean)
    tokens = reader.read("trainable_token_indices", _tokens([]), _tokens)
    reader.read("exclude_modules", None, _targets)
    reader.read("layers_to_transform", None, _layers)
    reader.read("layers_pattern", None, _targets)
    settings = LoraSettings(
        r=r,
        alpha=alpha,
        use_rslora=use_rslora,
        rank_pattern=ranks,
        alpha_pattern=alphas,
        use_dora=use_dora,
        target_modules=targets,
        base_model=base_model,
        lora_bias=lora_bias,
        bias=bias,
        saved=saved,
        ensure_weight_tying=tying,
        tokens=MappingProxyType(tokens),
    )
    return (None if reader.problems else settings), [*reader.problems, *unsupported_fields(config)]


class _Reader:
    """Takes fields out of a config and keeps what is wrong with them. Null means the default, as does absence."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self.problems: list[Problem] = []

    def read(self, field: str, default: _T, convert: Callable[[Any], _T]) -> _T:
        value = self._config.get(field)
        if value is None:
            return default
        try:
            return convert(value)
        except (_Wrong, ValueError) as error:
            self.problems.append(Problem(field, str(error)))
            return default


def _rank(value: Any) -> int:
    if type(value) is not int:
        raise _Wrong(f"is {said(value)}, not a whole number")
    if not 0 < value <= MAX_RANK:
        raise _Wrong(f"is {said(value)}; a rank is at least 1" + (f" and at most {MAX_RANK}" if value > 0 else ""))
    return value


def _alpha(value: Any) -> float:
    if type(value) not in (int, float):
        raise _Wrong(f"is {said(value)}, not a number")
    if type(value) is float and not math.isfinite(value):
        raise _Wrong(f"is {said(value)}, not a finite number")
    if abs(value) > MAX_SCALE:
        raise _Wrong(f"is {said(value)}, more than float32 can hold")
    return float(value)


def _rank_patterns(value: Any) -> Patterns[int]:
    return compile_patterns(_each(value, _rank))


def _alpha_patterns(value: Any) -> Patterns[float]:
    return compile_patterns(_each(value, _alpha))


def _each(value: Any, convert: Callable[[Any], _T]) -> dict[str, _T]:
    if not isinstance(value, dict):
        raise _Wrong(f"is {said(value)}, not an object of module names or expressions")
    converted = {}
    for key, item in value.items():
        try:
            converted[key] = convert(item)
        except _Wrong as error:
            raise _Wrong(f"[{shown(key)!r}] {error}") from error
    return converted


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _Wrong(f"is {said(value)}, not true or false")
    return value


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise _Wrong(f"is {said(value)}, not a string")
    return value


def _targets(value: Any) -> tuple[str, ...] | None:
    if isinstance(value, str):  # a regular expression, or the word all-linear: the tensors tell what it matched
        return None
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise _Wrong(f"is {said(value)}, neither a string nor a list of strings")
    return tuple(value)


def _bias(value: Any) -> str:
    if value not in BIASES:
        raise _Wrong(f"is {said(value)}, none of {', '.join(BIASES)}")
    return str(value)


def _saved(value: Any) -> tuple[str, ...]:
    """The tables that a list of modules_to_save names, by the ends of their names as in PEFT. Other modules are
    `unsupported_fields`' to refuse.
    """
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise _Wrong(f"is {said(value)}, not a list of module names")
    return tuple(table for table, path in TABLES.items() if any(item and path.endswith(item) for item in value))


def _tokens(value: Any) -> dict[str, tuple[int, ...]]:
    """A list of token ids belongs to the input embeddings, an object names modules."""
    named = value if isinstance(value, dict) else {"embed_tokens": value}
    tokens: dict[str, tuple[int, ...]] = {}
    for name, ids in named.items():
        table = next((table for table, path in TABLES.items() if name and path.endswith(name)), None)
        if table is None:
            raise _Wrong(f"names {shown(name)}; only rows of embed_tokens and lm_head can be retrained")
        if table in tokens:
            raise _Wrong(f"names {table} twice")
        if not isinstance(ids, list) or not all(type(id) is int and 0 <= id <= MAX_RANK for id in ids):
            raise _Wrong(f"is {said(value)}, neither a list of token ids nor an object with such lists")
        if len(set(ids)) != len(ids):
            raise _Wrong(f"names a token of {table} twice")
        if ids:
            tokens[table] = tuple(ids)
    return tokens


def _layers(value: Any) -> None:
    items = value if isinstance(value, list) else [value]
    if not all(type(item) is int for item in items):
        raise _Wrong(f"is {said(value)}, neither a whole number nor a list of them")
