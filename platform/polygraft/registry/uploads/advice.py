"""What to do about a problem, in the words of the tool that trained the adapter.

Problems come in PEFT's terms, which is what the files are in. Whoever trained with a tool on top of it has never set
those fields, but the tool's own; each of them is named here as the tool's documentation names it.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from polygraft.registry.uploads.contents import MAX_README, README_NAME
from polygraft_adapters.config import CONFIG_NAME, MAX_CONFIG_BYTES
from polygraft_adapters.folder import MLX_WEIGHTS_NAME
from polygraft_adapters.types import Problem

Tool = Literal["PEFT", "unsloth", "axolotl", "LLaMA-Factory", "MLX"]

_MODEL_CARD: tuple[tuple[str, Tool], ...] = (
    ("llama-factory", "LLaMA-Factory"),
    ("llamafactory", "LLaMA-Factory"),
    ("axolotl", "axolotl"),
    ("unsloth", "unsloth"),
)
"""Words of a README.md; the first that is there decides, as others' adapters are often trained on unsloth's models."""


@dataclass(frozen=True, slots=True)
class _Advice:
    """For problems whose text matches: what to change, by tool."""

    problem: re.Pattern[str]
    hints: Mapping[Tool, str]


_TOOLS: dict[str, Tool] = {
    "peft": "PEFT", "unsloth": "unsloth", "axolotl": "axolotl", "llamafactory": "LLaMA-Factory", "mlx": "MLX",
}  # fmt: skip


def _advice(problem: str, **hints: str) -> _Advice:
    return _Advice(re.compile(problem), {_TOOLS[name]: hint for name, hint in hints.items()})


_ADVICE = (
    _advice(
        r"rank [0-9]+ > limit",
        peft="train with a smaller r, or ask whoever runs the server for a larger --max-lora-rank",
        unsloth="pass a smaller r to FastLanguageModel.get_peft_model, or ask for a larger --max-lora-rank",
        axolotl="set a smaller lora_r, or ask whoever runs the server for a larger --max-lora-rank",
        llamafactory="set a smaller lora_rank, or ask whoever runs the server for a larger --max-lora-rank",
        mlx="set a smaller rank in lora_parameters, or ask whoever runs the server for a larger --max-lora-rank",
    ),
    _advice(
        r"NaN or infinite",
        peft="the training run diverged: train again with a lower learning_rate, in bf16 rather than fp16",
        unsloth="the training run diverged: lower learning_rate in the trainer's arguments, and bf16=True if it can",
        axolotl="the training run diverged: lower learning_rate, and set bf16: auto rather than fp16",
        llamafactory="the training run diverged: lower learning_rate, and set bf16: true rather than fp16",
        mlx="the training run diverged: lower learning_rate, or the scale in lora_parameters",
    ),
    _advice(
        r"modules_to_save|whole cop",
        unsloth="leave embed_tokens and lm_head out of target_modules and modules_to_save in get_peft_model",
        axolotl="remove lora_modules_to_save from the configuration, and tokens that it was set for",
        llamafactory="train without additional_target and resize_vocab; add_tokens and add_special_tokens set it, too",
    ),
    _advice(
        r"DoRA|use_dora|magnitude",
        unsloth="pass use_dora=False to get_peft_model",
        axolotl="remove peft_use_dora from the configuration",
        llamafactory="set use_dora: false",
        mlx="train with fine_tune_type: lora instead of dora",
    ),
    _advice(
        r"^bias|lora_bias|\bbias of\b",
        unsloth='pass bias="none" to get_peft_model',
    ),
    _advice(
        r"init_lora_weights",
        unsloth="pass init_lora_weights=True and no loftq_config to get_peft_model",
        axolotl="remove peft_init_lora_weights and loftq from the configuration",
        llamafactory="train without pissa_init, or with pissa_convert: true, which saves a plain adapter as well",
    ),
    _advice(
        r"lm_head or embed_tokens",
        unsloth="leave lm_head and embed_tokens out of target_modules in get_peft_model",
        axolotl="leave lm_head and embed_tokens out of lora_target_modules",
        llamafactory="leave lm_head and embed_tokens out of lora_target",
        mlx="leave lm_head and embed_tokens out of the keys in lora_parameters",
    ),
    _advice(
        r"but .* needs \[",
        unsloth="the base is another one: the model_name given to from_pretrained must be the model that is served",
        axolotl="the base is another one: base_model must be the model that is served",
        llamafactory="the base is another one: model_name_or_path must be the model that is served",
        mlx="the base is another one: --model must be the model that is served",
    ),
    _advice(
        r"instead of two dimensions|the file holds none",
        axolotl="gather the shards on saving: stage3_gather_16bit_weights_on_model_save in DeepSpeed's JSON, "
        "fsdp_state_dict_type: FULL_STATE_DICT with FSDP",
        llamafactory="gather the shards on saving: stage3_gather_16bit_weights_on_model_save in DeepSpeed's JSON",
    ),
    _advice(
        r"not there, only .*\.(bin|pt|pth|ckpt|pkl)\b",
        unsloth="pickles can run code and are never opened; model.save_pretrained(folder) writes safetensors",
        axolotl="pickles can run code and are never opened; set save_safetensors: true and save again",
        llamafactory="pickles can run code and are never opened; a current version saves safetensors",
    ),
    _advice(
        r"^adapter_(config\.json|model\.safetensors): not there",
        unsloth="model.save_pretrained(folder) writes both; save_pretrained_merged and GGUF files are no adapters",
        axolotl="upload the folder of output_dir, not the one that axolotl merge-lora writes",
        llamafactory="upload the folder of output_dir, not the one that llamafactory-cli export writes",
        mlx="upload the folder of --adapter-path, not the one that mlx_lm.fuse writes",
    ),
)  # fmt: skip


def advise(folder: Path, problems: Iterable[Problem]) -> list[Problem]:
    """The same problems with hints for the tool that left its traces in `folder`; PEFT's own where there are none."""
    tool = trained_with(folder)
    return [_for(tool, problem) for problem in problems]


def trained_with(folder: Path) -> Tool:
    """The training tool, from the adapter's files. Never raises for what is in them."""
    config = _config(folder)
    if (folder / MLX_WEIGHTS_NAME).exists() or "lora_parameters" in config or "fine_tune_type" in config:
        return "MLX"
    card = _text(folder / README_NAME, MAX_README).casefold()
    for word, tool in _MODEL_CARD:
        if word in card:
            return tool
    mapping = config.get("auto_mapping")
    base = config.get("base_model_name_or_path")
    if (isinstance(mapping, dict) and "unsloth_fixed" in mapping) or str(base).startswith("unsloth/"):
        return "unsloth"
    return "PEFT"


def _for(tool: Tool, problem: Problem) -> Problem:
    said = f"{problem.where}: {problem.problem}"
    for advice in _ADVICE:
        if advice.problem.search(said):
            hint = advice.hints.get(tool)
            if hint is None:
                return problem
            return dataclasses.replace(problem, hint=hint if tool == "PEFT" else f"in {tool}: {hint}")
    return problem


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads(_text(folder / CONFIG_NAME, MAX_CONFIG_BYTES))
    except (ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def _text(path: Path, most: int) -> str:
    try:
        with path.open("rb") as file:
            return file.read(most).decode("utf-8", "replace")
    except OSError:
        return ""
