"""Adapter folders for tests: written by hand, or by PEFT from a tiny random Llama."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from polygraft_adapters import ModuleShapes

HIDDEN, INTERMEDIATE, KV, VOCABULARY = 64, 96, 32, 32

Tensors = dict[str, Tensor]
Write = Callable[..., Path]


@pytest.fixture(scope="session")
def shapes() -> ModuleShapes:
    """A model of two layers, narrow enough to read its shapes in a message."""
    return ModuleShapes(
        layers=2,
        shapes={
            "q_proj": (HIDDEN, HIDDEN),
            "k_proj": (KV, HIDDEN),
            "v_proj": (KV, HIDDEN),
            "o_proj": (HIDDEN, HIDDEN),
            "gate_proj": (INTERMEDIATE, HIDDEN),
            "up_proj": (INTERMEDIATE, HIDDEN),
            "down_proj": (HIDDEN, INTERMEDIATE),
        },
        base_model="org/tiny",
        vocabulary=VOCABULARY,
        hidden=HIDDEN,
    )


@pytest.fixture
def tensors() -> Tensors:
    """LoRA of rank 8 on q_proj of layer 0 and down_proj of layer 1, under PEFT's names."""
    generator = torch.Generator().manual_seed(0)
    prefix = "base_model.model.model.layers"
    return {
        f"{prefix}.0.self_attn.q_proj.lora_A.weight": torch.randn(8, HIDDEN, generator=generator),
        f"{prefix}.0.self_attn.q_proj.lora_B.weight": torch.randn(HIDDEN, 8, generator=generator),
        f"{prefix}.1.mlp.down_proj.lora_A.weight": torch.randn(8, INTERMEDIATE, generator=generator),
        f"{prefix}.1.mlp.down_proj.lora_B.weight": torch.randn(HIDDEN, 8, generator=generator),
    }


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """write(tensors, **config) -> folder. Config fields are added to a plain one; `raw` replaces it."""
    count = 0

    def write_folder(tensors: Tensors, *, raw: str | None = None, **config: Any) -> Path:
        nonlocal count
        count += 1
        folder = tmp_path / f"adapter{count}"
        folder.mkdir()
        plain = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "base_model_name_or_path": "org/tiny"}
        (folder / "adapter_config.json").write_text(raw if raw is not None else json.dumps({**plain, **config}))
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
        return folder

    return write_folder
