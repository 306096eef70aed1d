"""What a config.json is read as, and what is refused by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.engine.bench import TINY_CONFIG

from polygraft_engine.models.architecture import parse_spec, read_spec, supported_architectures
from polygraft_engine.models.errors import ModelError, UnsupportedModel

MISTRAL = {**TINY_CONFIG, "architectures": ["MistralForCausalLM"]}
QWEN2 = {**TINY_CONFIG, "architectures": ["Qwen2ForCausalLM"]}
QWEN3 = {**TINY_CONFIG, "architectures": ["Qwen3ForCausalLM"]}


def test_reading_a_config_needs_no_torch() -> None:
    code = (
        "import sys, polygraft_engine, polygraft_engine.models.architecture, polygraft_engine.options; "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_table_names_what_is_supported() -> None:
    assert [row.name for row in supported_architectures()] == [
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
    ]


@pytest.mark.parametrize("names", [["GPT2LMHeadModel"], [], None, "LlamaForCausalLM2", [3]])
def test_an_unknown_architecture_is_refused_with_the_list(names: object) -> None:
    with pytest.raises(UnsupportedModel, match=r"LlamaForCausalLM .*SmolLM2.*Qwen3ForCausalLM"):
        parse_spec({**TINY_CONFIG, "architectures": names}, {})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantization_config .awq"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope type 'longrope'"),
        ({"rope_scaling": {"type": "linear"}}, "needs a factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "from layer to layer"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn'"),
        ({"num_attention_heads": 5, "head_dim": 12}, "5 query heads do not divide among 2"),
        ({"head_dim": 15}, "head_dim 15"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(changes: dict[str, object], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        parse_spec({**TINY_CONFIG, **changes}, {})


@pytest.mark.parametrize("value", [None, 0, -4, "64", True, 1.5])
def test_sizes_are_positive_integers(value: object) -> None:
    with pytest.raises(ModelError, match="hidden_size must be a positive integer"):
        parse_spec({**TINY_CONFIG, "hidden_size": value}, {})


def test_llama_biases_follow_the_config() -> None:
    plain = parse_spec(TINY_CONFIG, {})
    assert (plain.qkv_bias, plain.o_bias, plain.mlp_bias, plain.qk_norm) == (False, False, False, False)
    biased = parse_spec({**TINY_CONFIG, "attention_bias": True, "mlp_bias": True}, {})
    assert (biased.qkv_bias, biased.o_bias, biased.mlp_bias) == (True, True, True)


def test_qwen2_has_a_bias_on_q_k_and_v_and_qwen3_normalises_heads() -> None:
    qwen2, qwen3 = parse_spec(QWEN2, {}), parse_spec(QWEN3, {})
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.qk_norm) == (True, False, False)
    assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.qk_norm) == (False, False, True)


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (TINY_CONFIG, (None, None)),
        ({**TINY_CONFIG, "sliding_window": 8}, (None, None)),
        ({**MISTRAL, "sliding_window": 8}, (8, 8)),
        ({**MISTRAL, "sliding_window": None}, (None, None)),
        (MISTRAL, (4096, 4096)),
        ({**QWEN2, "sliding_window": 8}, (None, None)),
        ({**QWEN2, "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, (None, 8)),
        ({**QWEN2, "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2}, (None, None)),
        (
            {
                **QWEN3,
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (8, None),
        ),
        ({**QWEN3, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}, (None, None)),
    ],
)
def test_windows_are_those_of_transformers(config: dict[str, object], windows: tuple[int | None, ...]) -> None:
    assert parse_spec(config, {}).windows == windows


def test_the_generation_config_says_what_ends_an_output() -> None:
    assert parse_spec(TINY_CONFIG, {}).eos_token_ids == (2,)
    assert parse_spec(TINY_CONFIG, {"eos_token_id": [7, 9]}).eos_token_ids == (7, 9)
    assert parse_spec({**TINY_CONFIG, "eos_token_id": None}, {}).eos_token_ids == ()
    assert parse_spec({**TINY_CONFIG, "eos_token_id": 0}, {}).eos_token_ids == (0,)


def test_the_stored_dtype_is_read_under_both_names() -> None:
    old = {**TINY_CONFIG, "torch_dtype": "bfloat16"}
    del old["dtype"]
    assert parse_spec(old, {}).dtype == "bfloat16"
    assert parse_spec({**TINY_CONFIG, "dtype": "float16"}, {}).dtype == "float16"


def test_module_shapes_are_out_by_in() -> None:
    modules = parse_spec(TINY_CONFIG, {}).module_shapes("tiny")
    assert (modules.layers, modules.base_model) == (2, "tiny")
    assert modules.shapes["q_proj"] == (96, 64)
    assert modules.shapes["k_proj"] == (48, 64)
    assert modules.shapes["o_proj"] == (64, 96)
    assert modules.shapes["down_proj"] == (64, 96)


def test_broken_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json is not valid JSON"):
        read_spec(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="not a JSON object"):
        read_spec(tmp_path)
