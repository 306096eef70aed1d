"""From tensor names to places in the base model: every tensor binds to a module, or the adapter is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from polygraft_adapters.config import LoraSettings
from polygraft_adapters.header import TensorEntry
from polygraft_adapters.names import Part, parse_name
from polygraft_adapters.pairs import BoundModule, Placed, about, bind_pair, bind_vector
from polygraft_adapters.tables import TABLE_PARTS, BoundTable, Repeat, bind_tables
from polygraft_adapters.types import PARENTS, TABLES, ModuleKey, ModuleShapes, Problem
from polygraft_adapters.unsupported import BIAS_HINT, SHARDED_HINT, WHOLE_MODULE_HINT, unknown_tensor
from polygraft_adapters.wording import shown

DTYPES = ("F32", "F16", "BF16")

_LAYER_PARTS = (Part.A, Part.B, Part.MAGNITUDE, Part.LORA_BIAS, Part.BIAS)


@dataclass(slots=True)
class Binding:
    """The outcome: what bound to where, and everything that is wrong. Nothing may be used while `problems` is not
    empty.
    """

    modules: dict[ModuleKey, BoundModule] = field(default_factory=dict)
    """LoRA on modules of the layers."""
    biases: dict[ModuleKey, TensorEntry] = field(default_factory=dict)
    """Trained biases of the base, which replace its own."""
    tables: dict[str, BoundTable] = field(default_factory=dict)
    """What happens to embed_tokens and lm_head."""
    copies: list[Repeat] = field(default_factory=list)
    """Tensors that must hold what others do."""
    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def paths(self) -> list[str]:
        """The dotted names of all modules that have LoRA or are replaced, layers first."""
        return [*(key.path for key in sorted(self.modules)), *(TABLES[table] for table in self.tables)]

    @property
    def rank(self) -> int:
        """The largest of all modules, 0 where none has LoRA."""
        tables = [table.lora.rank for table in self.tables.values() if table.lora is not None]
        return max([*(module.rank for module in self.modules.values()), *tables], default=0)


def bind(entries: Sequence[TensorEntry], settings: LoraSettings, model: ModuleShapes, max_rank: int) -> Binding:
    """Bind every tensor to a module of the model, with the rank that the config gives it."""
    binding = Binding()
    if not entries:
        binding.problems.append(Problem("tensors", "the file holds none", SHARDED_HINT))
    layers: dict[ModuleKey, Placed] = {}
    tables: dict[str, Placed] = {}
    for entry in entries:
        problem = _place(entry, layers, tables, model)
        if problem is not None:
            binding.problems.append(problem)
    if settings.use_dora and not any(Part.MAGNITUDE in placed for placed in (*layers.values(), *tables.values())):
        binding.problems.append(
            Problem("use_dora", "is true, but the file has no lora_magnitude_vector: config and tensors disagree")
        )
    for key in sorted(layers):
        _bind_layer_module(key, layers[key], settings, model, binding)
    found = bind_tables(tables, settings, model)
    binding.tables, binding.copies = found.tables, found.copies
    binding.problems.extend(found.problems)
    if binding.rank > max_rank:
        words = f"rank {binding.rank} > limit {max_rank}, restart with --max-lora-rank {binding.rank}"
        binding.problems.append(Problem("r", words))
    binding.warnings.extend(_warnings(binding, settings, model))
    return binding


def _place(
    entry: TensorEntry, layers: dict[ModuleKey, Placed], tables: dict[str, Placed], model: ModuleShapes
) -> Problem | None:
    """Put a tensor where its name says, or say why it has no place."""
    name = parse_name(entry.name)
    if name is None:
        return unknown_tensor(entry.name)
    if name.layer is None:
        if name.part not in TABLE_PARTS[name.module]:
            return about(entry, f"is no tensor that {name.module} can have")
        placed = tables.setdefault(name.module, {})
    else:
        if PARENTS.get(name.module) != name.parent or name.module not in model.shapes:
            return about(entry, f"the model has no module {name.parent}.{name.module} that takes LoRA")
        if name.layer >= model.layers:
            return about(entry, f"the model has {model.layers} layers, 0 to {model.layers - 1}")
        if name.part not in _LAYER_PARTS:
            return about(
                entry, f"is a {name.part.value} of a layer's module, which is not supported", WHOLE_MODULE_HINT
            )
        placed = layers.setdefault(ModuleKey(name.layer, name.module), {})
    if name.part in placed:
        other = shown(placed[name.part].name)
        return about(entry, f"is a second {name.part.value} for the module of {other}", "save one adapter per file")
    placed[name.part] = entry
    if entry.dtype not in DTYPES:
        return about(entry, f"has dtype {entry.dtype}", "save the adapter in float32, float16 or bfloat16")
    return None


def _bind_layer_module(
    key: ModuleKey, placed: Placed, settings: LoraSettings, model: ModuleShapes, binding: Binding
) -> None:
    shape = model.shapes[key.target]
    bias = placed.get(Part.BIAS)
    if bias is not None:
        binding.problems.extend(_bias_problems(key, bias, shape[0], settings, model))
        binding.biases[key] = bias
    if placed.keys() == {Part.BIAS}:
        return
    module = bind_pair(key.path, placed, (Part.A, Part.B), shape, settings, binding.problems)
    if module is not None:
        binding.modules[key] = module


def _bias_problems(
    key: ModuleKey, entry: TensorEntry, width: int, settings: LoraSettings, model: ModuleShapes
) -> list[Problem]:
    if key.target not in model.biased:
        return [about(entry, f"is a trained bias, but {key.path} of the served model has none", BIAS_HINT)]
    if settings.bias == "none":
        what = 'is a trained bias of the base model, but the config says bias="none": config and tensors disagree'
        return [about(entry, what, BIAS_HINT)]
    return bind_vector(key.path, entry, width)


def _warnings(binding: Binding, settings: LoraSettings, model: ModuleShapes) -> list[str]:
    warnings = _target_warnings(binding.paths, settings)
    if settings.bias != "none" and model.biased and not binding.biases:
        warnings.append(
            f'the config says bias="{settings.bias}", but the file has no biases: the base model\'s are used'
        )
    return warnings


def _target_warnings(names: Sequence[str], settings: LoraSettings) -> list[str]:
    """Where a list of target_modules and the tensors tell different stories; PEFT matches names and their endings."""
    if settings.target_modules is None or not names:
        return []
    unused = [item for item in settings.target_modules if not any(f".{name}".endswith(f".{item}") for name in names)]
    if not unused:
        return []
    return [f"target_modules names {', '.join(map(shown, sorted(unused)))}, but the file has no tensors for it"]
