"""What LoRA training can ask for and this server does not compute: refused by name, in the words of who trained it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polygraft_adapters.types import Problem
from polygraft_adapters.wording import said, shown

WHOLE_MODULE_HINT = (
    "train without modules_to_save; resize_vocab, add_tokens or save_embedding_layers in the trainer set it, too"
)
BIAS_HINT = 'train with bias="none" and lora_bias=False'
DORA_HINT = "train with use_dora=False, or merge the adapter into its base model"
EMBEDDING_HINT = "leave lm_head and embed_tokens out of target_modules"
TOKENS_HINT = "train without trainable_token_indices"


@dataclass(frozen=True, slots=True)
class _Feature:
    field: str
    problem: str
    hint: str


# Fields of peft 0.21's LoraConfig that change the maths whenever they are set to anything.
_FEATURES = (
    _Feature("use_dora", "DoRA adapters are not supported", DORA_HINT),
    _Feature("lora_bias", "biases on lora_B are not supported", BIAS_HINT),
    _Feature("fan_in_fan_out", "transposed (Conv1D) base layers are not supported", "train with fan_in_fan_out=False"),
    _Feature("trainable_token_indices", "retrained embeddings of single tokens are not supported", TOKENS_HINT),
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


def unsupported_fields(config: Mapping[str, Any]) -> list[Problem]:
    """Every feature that a config switches on and this server does not have. Null, false and empty are off."""
    problems = [
        Problem(feature.field, feature.problem, feature.hint) for feature in _FEATURES if config.get(feature.field)
    ]
    peft_type = config.get("peft_type")
    if peft_type is not None and not (isinstance(peft_type, str) and peft_type.upper() == "LORA"):
        problems.append(Problem("peft_type", f"{said(peft_type)} adapters are not supported", "only LORA is"))
    bias = config.get("bias")
    if bias is not None and bias != "none":
        problems.append(Problem("bias", f"is {said(bias)}: trained biases are not supported", BIAS_HINT))
    modules = config.get("modules_to_save")
    if modules:
        names = ", ".join(map(said, modules if isinstance(modules, list) else [modules]))
        problems.append(
            Problem("modules_to_save", f"whole copies of {shown(names)} are not supported", WHOLE_MODULE_HINT)
        )
    return problems + _mutating_init(config.get("init_lora_weights"))


def _mutating_init(init: Any) -> list[Problem]:
    """Initialisations that change the base model's weights, so that the file alone is no delta to the base."""
    if not isinstance(init, str):
        return []
    field, name = "init_lora_weights", init.lower()
    if name.startswith(_CONVERTIBLE_INITS):
        what = f"{said(init)} initialisation changes the base model, so this adapter fits only the changed one"
        return [Problem(field, what, _CONVERT_HINT)]
    if name == "loftq":
        what = "LoftQ replaces the base model's weights by quantised ones, so this adapter fits only those"
        return [Problem(field, what, "train with init_lora_weights=True")]
    return []
