"""Tensor names in parts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polygraft_adapters.names import Part, TensorName, parse_name

Q = "base_model.model.model.layers.3.self_attn.q_proj"
EMBED = "base_model.model.model.embed_tokens"
HEAD = "base_model.model.lm_head"


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("lora_A.weight", Part.A),
        ("lora_A.default.weight", Part.A),
        ("lora_B.weight", Part.B),
        ("lora_B.bias", Part.LORA_BIAS),
        ("lora_B.my-adapter.bias", Part.LORA_BIAS),
        ("lora_magnitude_vector", Part.MAGNITUDE),
        ("lora_magnitude_vector.default.weight", Part.MAGNITUDE),
        ("bias", Part.BIAS),
        ("base_layer.bias", Part.BIAS),
        ("weight", Part.OWN),
        ("modules_to_save.default.weight", Part.OWN_AGAIN),
        ("base_layer.weight", Part.BASE),
        ("original_module.weight", Part.BASE),
        ("token_adapter.base_layer.weight", Part.BASE),
        ("base_layer.token_adapter.base_layer.weight", Part.BASE),
        ("token_adapter.trainable_tokens_delta", Part.TOKENS),
        ("base_layer.token_adapter.trainable_tokens_delta.default", Part.TOKENS),
        ("lora_embedding_A", Part.EMBEDDING_A),
        ("lora_embedding_B.default", Part.EMBEDDING_B),
    ],
)
def test_parts_of_every_module(name: str, part: Part) -> None:
    assert parse_name(f"{Q}.{name}") == TensorName(3, "self_attn", "q_proj", part)
    assert parse_name(f"{EMBED}.{name}") == TensorName(None, "", "embed_tokens", part)
    assert parse_name(f"{HEAD}.{name}") == TensorName(None, "", "lm_head", part)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "lm_head",
        "lm_head.",
        f"{Q}.lora_C.weight",
        f"{Q}.lora_A.one.two.weight",
        f"{Q}.lora_A",
        f"{Q}.weight.weight",
        "model.layers.03.self_attn.q_proj.lora_A.weight",
        "model.layers.-1.self_attn.q_proj.lora_A.weight",
        "other.layers.3.self_attn.q_proj.lora_A.weight",
        "xlm_head.weight",
        "model.norm.weight",
    ],
)
def test_names_that_are_no_part_of_an_adapter(name: str) -> None:
    assert parse_name(name) is None


@given(st.lists(st.sampled_from([*Q.split("."), *HEAD.split("."), "lora_A", "default", "weight", "", "\n", "é"])))
def test_any_name_has_an_answer(parts: list[str]) -> None:
    name = parse_name(".".join(parts))
    assert name is None or name.part in Part
