"""What an adapter is once it has been read: no torch here, so that the gateway can hold these too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

PARENTS = {
    "q_proj": "self_attn",
    "k_proj": "self_attn",
    "v_proj": "self_attn",
    "o_proj": "self_attn",
    "gate_proj": "mlp",
    "up_proj": "mlp",
    "down_proj": "mlp",
}
"""The block of a decoder layer in which each target lies; Llama, Mistral and Qwen agree."""

TARGETS = tuple(PARENTS)
"""The modules of a decoder layer that may carry LoRA, in the order in which they compute."""

EMBEDDING = "embed_tokens"
HEAD = "lm_head"
TABLES = {EMBEDDING: "model.embed_tokens", HEAD: "lm_head"}
"""The two modules with a row per token, and their dotted names within the base model."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with an adapter: where (a tensor's or field's name), what, and what to do about it."""

    where: str
    problem: str
    hint: str = ""
    kind: Literal["tensor", "field"] = "field"
    """What `where` names: a tensor or a module of them, or else a field of the config or a file."""

    def __str__(self) -> str:
        return f"{self.where}: {self.problem}" + (f" ({self.hint})" if self.hint else "")


class AdapterError(Exception):
    """An adapter that is refused; `problems` lists everything that is wrong with it, never only the first thing."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(str(problem) for problem in self.problems))


@dataclass(frozen=True, slots=True)
class ModuleShapes:
    """What a base model offers adapters: `shapes[target] = (out_features, in_features)`, the same in each of
    `layers` layers, and of the two tables, embed_tokens and lm_head, that they are [vocabulary, hidden].
    """

    layers: int
    shapes: Mapping[str, tuple[int, int]]
    base_model: str
    """The name that adapters are expected to carry as base_model_name_or_path; a different one is only a warning."""
    biased: tuple[str, ...] = ()
    """The targets that have a bias."""
    vocabulary: int = 0
    """Rows of embed_tokens and lm_head; 0 offers neither to adapters."""
    hidden: int = 0
    tied: bool = False
    """lm_head is embed_tokens."""


@dataclass(frozen=True, slots=True, order=True)
class ModuleKey:
    """One place in the base model that an adapter adds to."""

    layer: int
    target: str

    @property
    def path(self) -> str:
        """The module's dotted name within the base model, which PEFT's patterns are matched against."""
        return f"model.layers.{self.layer}.{PARENTS[self.target]}.{self.target}"


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """What can be told of a valid adapter without its numbers.

    `digest` is "sha256:<hex>" over the canonical contents: sorted tensor names, dtypes, shapes, bytes and the config
    fields that change the maths. `scale` is the scale of a module without rank or alpha pattern. `rank` is the largest
    rank of any module, 0 where none has LoRA. `targets` are the modules that compute something else than the base's.
    """

    digest: str
    rank: int
    scale: float
    targets: tuple[str, ...]
    size_bytes: int
    base_model: str | None
    warnings: tuple[str, ...]
