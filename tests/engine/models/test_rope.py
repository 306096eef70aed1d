"""The rotary table equals transformers'."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from polygraft_engine.models.rope import rope_table
from polygraft_engine.models.rope_spec import read_rope

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}

PARAMETERS: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "default", "rope_theta": 130000.0},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    {**LLAMA3, "rope_theta": 500000.0},
    {**LLAMA3, "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64},
    {**YARN, "rope_theta": 1000000.0},
    {**YARN, "rope_theta": 10000.0, "original_max_position_embeddings": 128, "attention_factor": 1.5},
    {**YARN, "rope_theta": 10000.0, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    {**YARN, "rope_theta": 10000.0, "mscale": 1.0, "mscale_all_dim": 0.5},
]


def expected(parameters: dict[str, Any], head_dim: int, positions: int) -> torch.Tensor:
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=positions,
        rope_parameters=dict(parameters),
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(positions).unsqueeze(0))
    return torch.stack((cos[0, :, : head_dim // 2], sin[0, :, : head_dim // 2]), dim=1)


@pytest.mark.parametrize("head_dim", [64, 24])
@pytest.mark.parametrize("parameters", PARAMETERS)
def test_the_table_equals_transformers(parameters: dict[str, Any], head_dim: int) -> None:
    positions = 300
    table = rope_table(read_rope({"rope_parameters": parameters}, positions), head_dim, positions)
    assert table.dtype == torch.float32
    torch.testing.assert_close(table, expected(parameters, head_dim, positions), rtol=1e-4, atol=1e-4)


def test_the_old_spelling_means_the_same() -> None:
    old = {"rope_theta": 500000.0, "rope_scaling": {**LLAMA3, "type": "llama3"}}
    new = {"rope_parameters": {**LLAMA3, "rope_theta": 500000.0}}
    assert read_rope(old, 131072) == read_rope(new, 131072)
    assert read_rope({"rope_theta": 7.0, "rope_scaling": None}, 8).theta == 7.0
