"""What LoRA training can ask for and this server does not compute: refused by name, in the words of who trained it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polygraft_adapters.types import TABLES, Problem
from polygraft_adapters.wording import said, shown

WHOLE_MODULE_HINT = "name only lm_head and embed_tokens in modules_to_save"
RESIZED_HINT = (
    "train without new rows: resize_token_embeddings, resize_vocab, add_tokens or new_special_tokens in the trainer "
    "make them, and modules_to_save or save_embedding_layers put them into the file; to retrain rows that the model "
    "has, use trainable_token_indices"
)
BIAS_HINT = 'bias and lora_bias must be those of the training run; bias="none" trains without'
DORA_HINT = "use_dora must be that of the training run"
TOKENS_HINT = "trainable_token_indices must be that of the training run"
SAVED_HINT = (
    "modules_to_save must be that of the training run; resize_vocab, add_tokens or save_embedding_layers in the "
    "trainer set it, too"
)
TYING_HINT = (
    "ensure_weight_tying trains one for embed_tokens and lm_head and saves it for each: save the adapter again, or set "
    "it to false in adapter_config.json for each to have its own"
)
SHARDED_HINT = "DeepSpeed ZeRO-3 and FSDP save empty or flat tensors unless the shards are gathered before the save"


@dataclass(frozen=True, slots=True)
class _Feature:
    field: str
    problem: str
    hint: str


# Fields of peft 0.21's LoraConfig that change the maths whenever they are set to anything.
_FEATURES = (
    _Feature("fan_in_fan_out", "transposed (Conv1D) base layers are not supported", "train with fan_in_fan_out=False"),
    _Feature("target_parameters", "LoRA on bare parameters is not supported", "use target_modules"),
    _Feature("megatron_config", "Megatron's parallel layers are not supported", "train without megatron_config"),
    _Feature(
        "alora_invocation_tokens",
        "activated LoRA (aLoRA) is not supported",
        "train without alora_invocation_tokens",
    ),
    _Feature("use_qalora", "QALoRA is not supported", "train with use_qalora=False"),
    _Feature("layer_replication", "replicated layers are not supported", "train without layer_replication"),
    _Feature("use_bdlora", "block-diagonal LoRA (BD-LoRA) is not supported", "train without use_bdlora"),
    _Feature("monteclora_config", "MonteCLoRA is not supported", "train without monteclora_config"),
    _Feature("arrow_config", "Arrow routing is not supported", "serve its adapters one by one"),
    _Feature("kasa_config", "KaSA changes the base model and is not supported", "train without kasa_config"),
)

_CONVERTIBLE_INITS = ("pissa", "olora", "corda", "lora_ga")
_CONVERT_HINT = "convert it with PEFT: save_pretrained(..., path_initial_model_for_weight_conversion=...)"


def other_method(config: Mapping[str, Any]) -> Problem | None:
    """What is wrong with a config that is no LoRA's: nothing else that it says can be judged."""
    peft_type = config.get("peft_type")
    if peft_type is None or (isinstance(peft_type, str) and peft_type.upper() == "LORA"):
        return None
    return Problem("peft_type", f"{said(peft_type)} adapters are not supported", "only LORA is")


def unsupported_fields(config: Mapping[str, Any]) -> list[Problem]:
    """Every feature that a config switches on and this server does not have. Null, false and empty are off."""
    problems = [
        Problem(feature.field, feature.problem, feature.hint) for feature in _FEATURES if config.get(feature.field)
    ]
    if config.get("use_dora") and config.get("lora_bias"):
        problems.append(Problem("lora_bias", "is set together with use_dora, which PEFT does not allow", BIAS_HINT))
    return problems + _other_saved_modules(config.get("modules_to_save")) + _mutating_init(config)


def unknown_tensor(name: str) -> Problem:
    """A tensor whose name is no part of an adapter as this server knows them."""
    parts = name.split(".")
    if "modules_to_save" in parts or "original_module" in parts:
        return _tensor(name, "is a whole copy of a module, which is not supported", WHOLE_MODULE_HINT)
    if {"lora_A", "lora_B"}.isdisjoint(parts):
        return _tensor(name, "is neither lora_A nor lora_B of any module")
    return _tensor(name, "belongs to no module of the model")


def _tensor(name: str, problem: str, hint: str = "") -> Problem:
    return Problem(shown(name), problem, hint, "tensor")


def _other_saved_modules(modules: Any) -> list[Problem]:
    if not isinstance(modules, list):
        return []
    others = [
        item
        for item in modules
        if isinstance(item, str) and not any(item and path.endswith(item) for path in TABLES.values())
    ]
    if not others:
        return []
    names = shown(", ".join(map(said, others)))
    return [Problem("modules_to_save", f"whole copies of {names} are not supported", WHOLE_MODULE_HINT)]


def _mutating_init(config: Mapping[str, Any]) -> list[Problem]:
    """Initialisations that change the base model's weights, so that the file alone is no delta to the base."""
    init = config.get("init_lora_weights")
    if not isinstance(init, str):
        return []
    field, name = "init_lora_weights", init.lower()
    if name.startswith(_CONVERTIBLE_INITS):
        what = f"{said(init)} initialisation changes the base model, so this adapter fits only the changed one"
        return [Problem(field, what, _CONVERT_HINT)]
    if name == "loftq":
        what = "LoftQ replaces the base model's weights by quantised ones, so this adapter fits only those"
        return [Problem(field, what, f"train with init_lora_weights=True, or {_CONVERT_HINT}")]
    return []
