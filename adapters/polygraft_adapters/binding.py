"""From tensor names to places in the base model: every tensor binds to a module, or the adapter is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from polygraft_adapters.config import MAX_SCALE, LoraSettings
from polygraft_adapters.header import TensorEntry
from polygraft_adapters.types import PARENTS, ModuleKey, ModuleShapes, Problem
from polygraft_adapters.unsupported import BIAS_HINT, DORA_HINT, EMBEDDING_HINT, TOKENS_HINT, WHOLE_MODULE_HINT
from polygraft_adapters.wording import shown

DTYPES = ("F32", "F16", "BF16")

# PEFT writes base_model.model.<module>.lora_A.weight. Wrappers add or drop leading parts, and a state dict saved by
# hand keeps the adapter's own name (`lora_A.default.weight`).
_LORA_NAME = re.compile(
    r"(?:(?:base_model|model|module|_orig_mod)\.)*layers\.(0|[1-9][0-9]{0,5})\.([a-z_]+)\.([a-z_]+)"
    r"\.lora_([AB])(?:\.[^.]+)?\.weight"
)
_SHARDED_HINT = "DeepSpeed ZeRO-3 and FSDP save empty or flat tensors unless the shards are gathered before the save"


@dataclass(frozen=True, slots=True)
class BoundModule:
    """One module's pair of tensors: a [rank, in_features] and b [out_features, rank], and the scale of B A."""

    a: TensorEntry
    b: TensorEntry
    rank: int
    scale: float


@dataclass(slots=True)
class Binding:
    """The outcome: the modules that bound, and everything that is wrong. Nothing may be used while `problems` is
    not empty.
    """

    modules: dict[ModuleKey, BoundModule] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def bind(entries: Sequence[TensorEntry], settings: LoraSettings, model: ModuleShapes, max_rank: int) -> Binding:
    """Bind every tensor to a module of the model, with the rank that the config gives it."""
    binding = Binding()
    if not entries:
        binding.problems.append(Problem("tensors", "the file holds none", _SHARDED_HINT))
    sides: dict[ModuleKey, dict[str, TensorEntry]] = {}
    for entry in entries:
        problem = _place(entry, sides, model)
        if problem is not None:
            binding.problems.append(problem)
    if settings.use_dora and not any("lora_magnitude_vector" in entry.name for entry in entries):
        binding.problems.append(
            Problem("use_dora", "is true, but the file has no lora_magnitude_vector: config and tensors disagree")
        )
    for key in sorted(sides):
        _pair(key, sides[key], settings, model, binding)
    rank = max((module.rank for module in binding.modules.values()), default=0)
    if rank > max_rank:
        binding.problems.append(Problem("r", f"rank {rank} > limit {max_rank}, restart with --max-lora-rank {rank}"))
    binding.warnings.extend(_target_warnings(binding.modules, settings))
    return binding


def _place(entry: TensorEntry, sides: dict[ModuleKey, dict[str, TensorEntry]], model: ModuleShapes) -> Problem | None:
    """Put a tensor where its name says, or say why it has no place."""
    name = shown(entry.name)
    match = _LORA_NAME.fullmatch(entry.name)
    if match is None:
        return _stranger(entry.name)
    layer, parent, target, side = int(match[1]), match[2], match[3], match[4]
    if PARENTS.get(target) != parent or target not in model.shapes:
        return Problem(name, f"the model has no module {parent}.{target} that takes LoRA")
    if layer >= model.layers:
        return Problem(name, f"the model has {model.layers} layers, 0 to {model.layers - 1}")
    placed = sides.setdefault(ModuleKey(layer, target), {})
    if side in placed:
        return Problem(
            name, f"is a second lora_{side} for the module of {shown(placed[side].name)}", "save one adapter per file"
        )
    placed[side] = entry
    if entry.dtype not in DTYPES:
        return Problem(name, f"has dtype {entry.dtype}", "save the adapter in float32, float16 or bfloat16")
    return None


def _pair(
    key: ModuleKey, placed: Mapping[str, TensorEntry], settings: LoraSettings, model: ModuleShapes, binding: Binding
) -> None:
    if len(placed) == 1:
        ((side, entry),) = placed.items()
        other = "B" if side == "A" else "A"
        binding.problems.append(Problem(shown(entry.name), f"has no lora_{other} beside it"))
        return
    a, b = placed["A"], placed["B"]
    out_features, in_features = model.shapes[key.target]
    module, rank = key.path, settings.rank(key.path)
    problems = _shape_problems(module, a, ("r", in_features)) + _shape_problems(module, b, (out_features, "r"))
    if not problems:
        if a.shape[0] != b.shape[1]:
            problems.append(Problem(module, f"lora_A has rank {a.shape[0]} and lora_B has rank {b.shape[1]}"))
        elif a.shape[0] != rank:
            hint = "r and rank_pattern must be those of the training run"
            problems.append(Problem(module, f"has rank {a.shape[0]} in the file and {rank} in the config", hint))
        elif abs(settings.scale(module)) > MAX_SCALE:
            problems.append(Problem(module, "its scale is more than float32 can hold", "lora_alpha is too large"))
    binding.problems.extend(problems)
    if not problems:
        binding.modules[key] = BoundModule(a, b, rank, settings.scale(module))


def _shape_problems(module: str, entry: TensorEntry, expected: tuple[int | str, int | str]) -> list[Problem]:
    name, actual = shown(entry.name), list(entry.shape)
    if 0 in entry.shape or len(entry.shape) != 2:
        return [Problem(name, f"has shape {actual} instead of two dimensions", _SHARDED_HINT)]
    if all(want in ("r", got) for want, got in zip(expected, entry.shape, strict=True)):
        return []
    wanted = ", ".join(map(str, expected))
    hint = "the adapter was trained on a model of another size"
    return [Problem(name, f"has shape {actual}, but {module} needs [{wanted}]", hint)]


def _stranger(name: str) -> Problem:
    """A tensor that is no lora_A or lora_B of a decoder layer: named for the training option that made it."""
    where, parts = shown(name), name.split(".")
    if "lora_magnitude_vector" in parts:
        return Problem(where, "is a magnitude vector of DoRA, which is not supported", DORA_HINT)
    if "trainable_tokens_delta" in parts or "token_adapter" in parts:
        return Problem(where, "holds retrained tokens, which are not supported", TOKENS_HINT)
    if parts[-1] == "bias":
        what = "a bias of lora_B" if "lora_B" in parts else "a bias of the base model"
        return Problem(where, f"is {what}, which is not supported", BIAS_HINT)
    is_head = "lm_head" in parts or "embed_tokens" in parts
    if (
        "lora_embedding_A" in parts
        or "lora_embedding_B" in parts
        or (is_head and not {"lora_A", "lora_B"}.isdisjoint(parts))
    ):
        return Problem(where, "is LoRA on lm_head or embed_tokens, which is not supported", EMBEDDING_HINT)
    if is_head or "modules_to_save" in parts:
        return Problem(where, "is a whole copy of a module, which is not supported", WHOLE_MODULE_HINT)
    if {"lora_A", "lora_B"}.isdisjoint(parts):
        return Problem(where, "is neither lora_A nor lora_B of any module")
    return Problem(where, "belongs to no module of the model")


def _target_warnings(modules: Mapping[ModuleKey, BoundModule], settings: LoraSettings) -> list[str]:
    """Where a list of target_modules and the tensors tell different stories; PEFT matches names and their endings."""
    if settings.target_modules is None or not modules:
        return []
    names = [key.path for key in modules]
    unused = [item for item in settings.target_modules if not any(f".{name}".endswith(f".{item}") for name in names)]
    if not unused:
        return []
    return [f"target_modules names {', '.join(map(shown, sorted(unused)))}, but the file has no tensors for it"]
