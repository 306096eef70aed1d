"""Everything PEFT's LoRA can write, for tiny models with and without biases and tied tables, and what PEFT computes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config

VOCABULARY = 160
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.15,
}
MODELS: dict[str, Callable[[], Any]] = {
    "plain": lambda: LlamaConfig(**SIZES),
    "biased": lambda: LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "tied": lambda: Qwen2Config(**SIZES, tie_word_embeddings=True),
}

LAYERS = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
TOKENS = [5, 17, 90, 4]

FEATURES: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": LAYERS},
    "rslora": {"target_modules": "all-linear", "r": 6, "use_rslora": True},
    "dora": {"target_modules": "all-linear", "use_dora": True},
    "dora-patterns": {
        "target_modules": LAYERS,
        "use_dora": True,
        "use_rslora": True,
        "layers_to_transform": [1],
        "rank_pattern": {"q_proj": 5},
        "alpha_pattern": {"down_proj": 3},
    },
    "lora-bias": {"target_modules": LAYERS, "lora_bias": True},
    "bias-all": {"target_modules": ["q_proj", "down_proj"], "bias": "all"},
    "bias-lora-only": {"target_modules": ["k_proj", "up_proj"], "bias": "lora_only"},
    "dora-bias-all": {"target_modules": LAYERS, "use_dora": True, "bias": "all"},
    "lora-bias-and-bias": {"target_modules": LAYERS, "lora_bias": True, "bias": "all"},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "head-lora-bias": {"target_modules": ["lm_head"], "lora_bias": True},
    "head-dora": {"target_modules": ["lm_head", "up_proj"], "use_dora": True, "rank_pattern": {"lm_head": 7}},
    "embedding": {"target_modules": ["embed_tokens", "k_proj"], "alpha_pattern": {"embed_tokens": 2}},
    "embedding-dora": {"target_modules": ["embed_tokens", "v_proj"], "use_dora": True},
    "both-tables": {"target_modules": ["embed_tokens", "lm_head"]},
    "both-tables-tied": {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
    "saved-head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "saved-embedding": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "saved-both": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "saved-tied": {
        "target_modules": ["q_proj"],
        "modules_to_save": ["embed_tokens", "lm_head"],
        "ensure_weight_tying": True,
    },
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": TOKENS},
    "tokens-of-both": {
        "target_modules": ["q_proj"],
        "trainable_token_indices": {"embed_tokens": TOKENS, "lm_head": [1, 90]},
    },
    "tokens-of-head": {"target_modules": ["q_proj"], "trainable_token_indices": {"lm_head": TOKENS}},
    "tokens-and-head": {"target_modules": ["q_proj", "lm_head"], "trainable_token_indices": TOKENS},
    "saved-along": {"target_modules": ["q_proj"]},
    "mica": {"target_modules": ["q_proj"], "init_lora_weights": "mica"},
}
"""By name, LoraConfig's fields; r 4 and lora_alpha 8 unless told otherwise."""
SAVED_ALONG = ("saved-along", "saved-head")
"""Saved with save_embedding_layers=True, after the base was changed."""


@dataclass(frozen=True)
class Golden:
    """A model on disk, an adapter on disk for every feature, and what transformers + PEFT compute with them."""

    folder: Path
    adapters: dict[str, Path]
    base: PreTrainedModel
    _models: dict[str, PeftModel] = field(default_factory=dict)

    @torch.inference_mode()
    def logits(self, feature: str | None, tokens: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """float32 [len(tokens), V] from the files as PEFT loads them, unmerged, alone and in one pass."""
        ids = torch.tensor([list(tokens)])
        model = self._model(feature, dtype)
        return model(input_ids=ids, use_cache=False).logits[0].float()

    def _model(self, feature: str | None, dtype: torch.dtype) -> torch.nn.Module:
        base = deepcopy(self.base).to(dtype)
        if feature is None:
            return base.eval()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return PeftModel.from_pretrained(base, self.adapters[feature]).eval()


def _train(model: PeftModel) -> None:
    """Random numbers where training would leave some."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            if "magnitude" in name:
                parameter.mul_(1 + 0.3 * torch.rand_like(parameter))
            elif "lora_" in name and not name.endswith("bias"):
                parameter.copy_(torch.randn_like(parameter) * 0.25)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.2)


def _build(name: str, root: Path) -> Golden:
    torch.manual_seed(sum(map(ord, name)))
    folder = root / name
    base: PreTrainedModel = AutoModelForCausalLM.from_config(MODELS[name](), attn_implementation="eager").eval()
    with torch.no_grad():
        for key, parameter in base.named_parameters():
            if key.endswith(("bias", "norm.weight", "layernorm.weight")):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    base.save_pretrained(folder)
    adapters = {}
    for feature, options in FEATURES.items():
        adapters[feature] = root / f"{name}-{feature}"
        model = get_peft_model(deepcopy(base), LoraConfig(**{"r": 4, "lora_alpha": 8, **options}))
        _train(model)
        if feature in SAVED_ALONG:
            with torch.no_grad():
                for table in (model.get_input_embeddings(), model.get_output_embeddings()):
                    table.weight.add_(torch.randn_like(table.weight) * 0.1)
        model.save_pretrained(adapters[feature], save_embedding_layers=True if feature in SAVED_ALONG else "auto")
    return Golden(folder, adapters, base)


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Golden]:
    """`golden(name)`: the model of that name in MODELS, made once."""
    root = tmp_path_factory.mktemp("features")

    def build(name: str) -> Golden:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT's, of all that one can do wrong with these options
            return _build(name, root)

    return cache(build)
