"""One module's LoRA: two matrices that fit each other and the module, with what DoRA and lora_bias put beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from polygraft_adapters.config import MAX_SCALE, LoraSettings
from polygraft_adapters.header import TensorEntry
from polygraft_adapters.names import Part
from polygraft_adapters.types import Problem
from polygraft_adapters.unsupported import BIAS_HINT, DORA_HINT, SHARDED_HINT
from polygraft_adapters.wording import shown

Placed = dict[Part, TensorEntry]
"""The tensors of one module."""

SIBLING_HINT = "the adapter was trained on a model of another size"


@dataclass(frozen=True, slots=True)
class BoundModule:
    """One module's tensors and the scale of B A: a [rank, in_features], b [out_features, rank]; magnitude (DoRA) and
    bias (of lora_B) [out_features], for embed_tokens [hidden], or None.
    """

    a: TensorEntry
    b: TensorEntry
    rank: int
    scale: float
    magnitude: TensorEntry | None = None
    bias: TensorEntry | None = None


def about(entry: TensorEntry, problem: str, hint: str = "") -> Problem:
    """A Problem with a tensor."""
    return Problem(shown(entry.name), problem, hint, "tensor")


def bind_pair(
    path: str,
    placed: Placed,
    sides: tuple[Part, Part],
    shape: tuple[int, int],
    settings: LoraSettings,
    problems: list[Problem],
) -> BoundModule | None:
    """The LoRA of the module called `path`, whose A and B are the parts `sides`; None after adding to `problems`.

    `shape` is (rows of B, columns of A).
    """
    a, b = (placed.get(side) for side in sides)
    if a is None or b is None:
        present = [part for part in (*sides, Part.MAGNITUDE, Part.LORA_BIAS) if part in placed]
        missing = next(side for side in sides if side not in placed)
        problems.append(about(placed[present[0]], f"has no {missing.value} beside it"))
        return None
    found = _matrix_problems(path, a, ("r", shape[1])) + _matrix_problems(path, b, (shape[0], "r"))
    if not found:
        found = _rank_problems(path, a, b, sides, settings)
    found += _dora_problems(path, placed, a, shape[0], settings) + _lora_bias_problems(
        path, placed, b, shape[0], settings
    )
    problems.extend(found)
    if found:
        return None
    return BoundModule(a, b, a.shape[0], settings.scale(path), placed.get(Part.MAGNITUDE), placed.get(Part.LORA_BIAS))


def bind_vector(path: str, entry: TensorEntry, width: int) -> list[Problem]:
    """What keeps a tensor from being one number for each of `width` outputs."""
    if entry.shape == (width,):
        return []
    return [about(entry, f"has shape {list(entry.shape)}, but {path} needs [{width}]", SIBLING_HINT)]


def not_a_matrix(entry: TensorEntry) -> Problem | None:
    """What is wrong with a tensor that has not two dimensions, or no numbers."""
    if not entry.shape:
        return about(entry, "is a single number instead of a matrix", "save the adapter again")
    if 0 in entry.shape or len(entry.shape) != 2:
        return about(entry, f"has shape {list(entry.shape)} instead of two dimensions", SHARDED_HINT)
    return None


def _matrix_problems(path: str, entry: TensorEntry, expected: Sequence[int | str]) -> list[Problem]:
    actual = list(entry.shape)
    if (flat := not_a_matrix(entry)) is not None:
        return [flat]
    if all(want in ("r", got) for want, got in zip(expected, entry.shape, strict=True)):
        return []
    wanted = ", ".join(map(str, expected))
    return [about(entry, f"has shape {actual}, but {path} needs [{wanted}]", SIBLING_HINT)]


def _rank_problems(
    path: str, a: TensorEntry, b: TensorEntry, sides: tuple[Part, Part], settings: LoraSettings
) -> list[Problem]:
    rank = settings.rank(path)
    if a.shape[0] != b.shape[1]:
        what = f"{sides[0].value} has rank {a.shape[0]} and {sides[1].value} has rank {b.shape[1]}"
        return [Problem(path, what, kind="tensor")]
    if a.shape[0] != rank:
        hint = "r and rank_pattern must be those of the training run"
        return [Problem(path, f"has rank {a.shape[0]} in the file and {rank} in the config", hint, "tensor")]
    if abs(settings.scale(path)) > MAX_SCALE:
        return [Problem(path, "its scale is more than float32 can hold", "lora_alpha is too large", "tensor")]
    return []


def _dora_problems(path: str, placed: Placed, a: TensorEntry, width: int, settings: LoraSettings) -> list[Problem]:
    entry = placed.get(Part.MAGNITUDE)
    if entry is None:
        return (
            [about(a, "has no lora_magnitude_vector beside it, but use_dora is true", DORA_HINT)]
            if settings.use_dora
            else []
        )
    if not settings.use_dora:
        what = "is a magnitude vector of DoRA, but use_dora is not true in the config: config and tensors disagree"
        return [about(entry, what, DORA_HINT)]
    return bind_vector(path, entry, width)


def _lora_bias_problems(path: str, placed: Placed, b: TensorEntry, width: int, settings: LoraSettings) -> list[Problem]:
    entry = placed.get(Part.LORA_BIAS)
    if entry is None:
        return [about(b, "has no bias, but lora_bias is true in the config", BIAS_HINT)] if settings.lora_bias else []
    if not settings.lora_bias:
        what = "is a bias of lora_B, but lora_bias is not true in the config: config and tensors disagree"
        return [about(entry, what, BIAS_HINT)]
    return bind_vector(path, entry, width)
