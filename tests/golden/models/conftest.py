"""Tiny random models of every architecture, as transformers saves them, with LoRA adapters as PEFT saves them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

VOCABULARY = 160
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}

CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "llama-tied": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama-biased": lambda: LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, head_dim=24),
    "llama-llama3-rope": lambda: LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "llama-linear-rope": lambda: LlamaConfig(**SIZES, rope_parameters=LINEAR),
    "mistral-windowed": lambda: MistralConfig(**SIZES, sliding_window=24),
    "qwen2": lambda: Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2-windowed": lambda: Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=20, max_window_layers=1),
    "qwen2-yarn-rope": lambda: Qwen2Config(**SIZES, rope_parameters=YARN),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=32),
}

ADAPTERS = {
    "all-r4": LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"),
    "qv-r8": LoraConfig(r=8, lora_alpha=8, target_modules=["q_proj", "v_proj"]),
    "mlp-r3-rslora": LoraConfig(
        r=3, lora_alpha=5, use_rslora=True, target_modules=["gate_proj", "up_proj", "down_proj"]
    ),
    "kod-r16": LoraConfig(
        r=16, lora_alpha=4, target_modules=["k_proj", "o_proj", "down_proj"], layers_to_transform=[0, 2]
    ),
    "patterned": LoraConfig(
        r=2,
        lora_alpha=6,
        target_modules=["q_proj", "up_proj"],
        rank_pattern={"q_proj": 5},
        alpha_pattern={"up_proj": 1},
    ),
}
"""PEFT's own configs: ranks, scales, modules and layers all differ."""


@dataclass(frozen=True)
class Golden:
    """One model on disk, its adapters on disk, and what transformers + PEFT compute with them."""

    folder: Path
    adapters: dict[str, Path]
    model: PeftModel

    @torch.inference_mode()
    def logits(self, adapter: str | None, tokens: Sequence[int]) -> torch.Tensor:
        """float32 [len(tokens), V], computed alone, in one pass, without a cache."""
        ids = torch.tensor([list(tokens)])
        if adapter is None:
            with self.model.disable_adapter():
                return self.model(input_ids=ids, use_cache=False).logits[0]
        self.model.set_adapter(adapter)
        return self.model(input_ids=ids, use_cache=False).logits[0]

    def greedy(self, adapter: str | None, prompt: Sequence[int], count: int) -> list[int]:
        """The next `count` tokens, each from a whole pass over all that came before."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(adapter, tokens)[-1].argmax()))
        return tokens[len(prompt) :]


def _build(name: str, root: Path) -> Golden:
    torch.manual_seed(sum(map(ord, name)))
    folder = root / name
    model: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="eager")
    model.eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith(("bias", "norm.weight", "layernorm.weight")):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    # shards of a few layers each, so that the index is read too
    model.save_pretrained(folder, max_shard_size="200KB")
    first, *others = ADAPTERS
    peft = get_peft_model(model, ADAPTERS[first], adapter_name=first)
    for adapter in others:
        peft.add_adapter(adapter, ADAPTERS[adapter])
    for key, parameter in peft.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(parameter, std=0.3)
    peft.save_pretrained(str(root / f"{name}-adapters"))
    adapters = {adapter: root / f"{name}-adapters" / adapter for adapter in ADAPTERS}
    peft.eval()
    return Golden(folder, adapters, peft)


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Golden]:
    """`golden(name)`: the model of that name in CONFIGS, made once."""
    root = tmp_path_factory.mktemp("golden")
    return cache(lambda name: _build(name, root))
