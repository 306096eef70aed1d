"""adapter_config.json: PEFT's defaults and types, and what is refused by name."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polygraft_adapters import Problem
from polygraft_adapters.config import LoraSettings, parse_config

Q0 = "model.layers.0.self_attn.q_proj"


def parse(**config: Any) -> tuple[LoraSettings | None, list[Problem]]:
    return parse_config(json.dumps(config).encode())


def settings_of(**config: Any) -> LoraSettings:
    parsed, problems = parse(**config)
    assert problems == []
    assert parsed is not None
    return parsed


def fields(**config: Any) -> list[str]:
    return [problem.where for problem in parse(**config)[1]]


@pytest.mark.parametrize(
    ("config", "r", "scale"),
    [
        ({"r": 8, "lora_alpha": 16}, 8, 2.0),
        ({"r": 8, "lora_alpha": 16.0}, 8, 2.0),
        ({"r": 8, "lora_alpha": 0.5}, 8, 0.0625),
        ({"r": 8, "lora_alpha": 0}, 8, 0.0),
        ({"r": 16}, 16, 0.5),
        ({"lora_alpha": 4}, 8, 0.5),
        ({}, 8, 1.0),
        ({"r": None, "lora_alpha": None, "use_rslora": None, "rank_pattern": None}, 8, 1.0),
        ({"r": 16, "lora_alpha": 16, "use_rslora": True}, 16, 4.0),
        ({"r": 3, "lora_alpha": 3, "use_rslora": True}, 3, 3 / math.sqrt(3)),
    ],
)
def test_rank_and_scale_with_the_defaults_of_peft(config: dict[str, Any], r: int, scale: float) -> None:
    parsed = settings_of(**config)
    assert (parsed.rank(Q0), parsed.scale(Q0), parsed.default_scale) == (r, scale, scale)


def test_patterns_give_a_module_its_own_rank_and_alpha() -> None:
    parsed = settings_of(r=8, lora_alpha=16, rank_pattern={"q_proj": 4}, alpha_pattern={r"layers\.0\..*": 1.5})
    assert parsed.rank(Q0) == 4
    assert parsed.scale(Q0) == 1.5 / 4
    assert parsed.scale("model.layers.1.self_attn.v_proj") == 2.0
    assert settings_of(use_rslora=True, rank_pattern={"q_proj": 4}).scale(Q0) == 8 / 2


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"r": "8"}, "r"),
        ({"r": 8.0}, "r"),
        ({"r": True}, "r"),
        ({"r": 0}, "r"),
        ({"r": -1}, "r"),
        ({"r": 2**40}, "r"),
        ({"r": [8]}, "r"),
        ({"lora_alpha": "16"}, "lora_alpha"),
        ({"lora_alpha": True}, "lora_alpha"),
        ({"lora_alpha": math.nan}, "lora_alpha"),
        ({"lora_alpha": math.inf}, "lora_alpha"),
        ({"lora_alpha": -math.inf}, "lora_alpha"),
        ({"lora_alpha": 1e300}, "lora_alpha"),
        ({"lora_alpha": 10**1000}, "lora_alpha"),
        ({"use_rslora": "true"}, "use_rslora"),
        ({"use_rslora": 1}, "use_rslora"),
        ({"rank_pattern": [["q_proj", 4]]}, "rank_pattern"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern"),
        ({"rank_pattern": {"q_proj": "4"}}, "rank_pattern"),
        ({"rank_pattern": {"(": 4}}, "rank_pattern"),
        ({"rank_pattern": {"(a+)+": 4}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": math.nan}}, "alpha_pattern"),
        ({"target_modules": 5}, "target_modules"),
        ({"target_modules": ["q_proj", 5]}, "target_modules"),
        ({"exclude_modules": {}}, "exclude_modules"),
        ({"layers_to_transform": "0"}, "layers_to_transform"),
        ({"layers_to_transform": [0, "1"]}, "layers_to_transform"),
        ({"base_model_name_or_path": 5}, "base_model_name_or_path"),
    ],
)
def test_an_impossible_value_names_its_field(config: dict[str, Any], field: str) -> None:
    parsed, problems = parse(**config)
    assert parsed is None
    assert [problem.where for problem in problems] == [field]


def test_a_number_that_overflows_in_the_file_is_not_finite() -> None:
    assert [problem.where for problem in parse_config(b'{"lora_alpha": 1e999}')[1]] == ["lora_alpha"]
    assert "NaN" in str(parse_config(b'{"lora_alpha": NaN}')[1][0])


def test_a_number_too_long_to_parse_is_refused() -> None:
    assert parse_config(b'{"r": ' + b"9" * 5000 + b"}")[0] is None


def test_every_problem_is_told() -> None:
    assert fields(r="8", lora_alpha="x", use_qalora=True, bias="some") == ["r", "lora_alpha", "bias", "use_qalora"]


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"5", b"null", b'"x"', b"\xff", b"[" * 100_000])
def test_a_file_that_is_no_json_object_is_refused(raw: bytes) -> None:
    parsed, problems = parse_config(raw)
    assert parsed is None
    assert [problem.where for problem in problems] == ["adapter_config.json"]


def test_of_another_method_only_the_method_is_told() -> None:
    parsed, problems = parse_config(json.dumps({"peft_type": "OFT", "r": 0, "bias": 5}).encode())
    assert parsed is None
    assert [problem.where for problem in problems] == ["peft_type"]


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("modules_to_save", ["embed_tokens", "score", "norm"], '"score", "norm"'),
        ("modules_to_save", [""], '""'),
        ("fan_in_fan_out", True, "Conv1D"),
        ("target_parameters", ["mlp.experts.gate_up_proj"], "parameters"),
        ("peft_type", "ADALORA", "ADALORA"),
        ("peft_type", "PROMPT_TUNING", "PROMPT_TUNING"),
        ("megatron_config", {"hidden": 1}, "Megatron"),
        ("alora_invocation_tokens", [5], "aLoRA"),
        ("use_qalora", True, "QALoRA"),
        ("layer_replication", [[0, 4], [2, 5]], "replicated"),
        ("use_bdlora", {"nblocks": 2}, "BD-LoRA"),
        ("monteclora_config", {"num_samples": 2}, "MonteCLoRA"),
        ("arrow_config", {"top_k": 2}, "Arrow"),
        ("kasa_config", {"beta": 1e-4}, "KaSA"),
        ("init_lora_weights", "pissa", "path_initial_model_for_weight_conversion"),
        ("init_lora_weights", "pissa_niter_16", "path_initial_model_for_weight_conversion"),
        ("init_lora_weights", "olora", "path_initial_model_for_weight_conversion"),
        ("init_lora_weights", "corda", "path_initial_model_for_weight_conversion"),
        ("init_lora_weights", "lora_ga", "path_initial_model_for_weight_conversion"),
        ("init_lora_weights", "loftq", "path_initial_model_for_weight_conversion"),
    ],
)
def test_what_is_not_served_is_refused_by_name(field: str, value: Any, words: str) -> None:
    _, problems = parse(**{field: value})
    assert [problem.where for problem in problems] == [field]
    assert words in str(problems[0])
    assert problems[0].hint


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("bias", ["none"], "none of none, all, lora_only"),
        ("bias", "some", "none of none, all, lora_only"),
        ("lora_bias", 1, "not true or false"),
        ("modules_to_save", "lm_head", "not a list of module names"),
        ("modules_to_save", [1], "not a list of module names"),
        ("trainable_token_indices", 5, "neither a list of token ids"),
        ("trainable_token_indices", [1, True], "neither a list of token ids"),
        ("trainable_token_indices", [-1], "neither a list of token ids"),
        ("trainable_token_indices", [2**40], "neither a list of token ids"),
        ("trainable_token_indices", [7, 8, 7], "names a token of embed_tokens twice"),
        ("trainable_token_indices", {"wte": [1]}, "names wte"),
        ("trainable_token_indices", {"": [1]}, "only rows of embed_tokens and lm_head"),
        ("trainable_token_indices", {"lm_head": [1], "head": [2]}, "names lm_head twice"),
    ],
)
def test_impossible_values_of_the_other_fields_are_refused(field: str, value: Any, words: str) -> None:
    settings, problems = parse(**{field: value})
    assert settings is None
    assert [problem.where for problem in problems] == [field]
    assert words in str(problems[0])


def test_biases_on_lora_b_with_dora_are_refused() -> None:
    assert fields(use_dora=True, lora_bias=True) == ["lora_bias"]


def test_tables_are_named_by_the_ends_of_their_names() -> None:
    assert settings_of(modules_to_save=["lm_head"]).saved == ("lm_head",)
    assert settings_of(modules_to_save=["lm_head", "model.embed_tokens"]).saved == ("embed_tokens", "lm_head")
    assert settings_of(modules_to_save=[]).saved == settings_of(modules_to_save=None).saved == ()
    assert settings_of(trainable_token_indices=[4, 1]).tokens == {"embed_tokens": (4, 1)}
    tokens = {"model.embed_tokens": [3], "lm_head": [2, 1]}
    assert settings_of(trainable_token_indices=tokens).tokens == {"embed_tokens": (3,), "lm_head": (2, 1)}
    assert settings_of(trainable_token_indices=[]).tokens == {}


def test_off_and_harmless_fields_are_accepted() -> None:
    settings_of(
        peft_type="lora",
        use_dora=False,
        lora_bias=False,
        bias="none",
        modules_to_save=[],
        fan_in_fan_out=False,
        trainable_token_indices=None,
        target_parameters=[],
        megatron_config=None,
        megatron_core="megatron.core",
        alora_invocation_tokens=None,
        layer_replication=None,
        qalora_group_size=16,
        init_lora_weights="gaussian",
        exclude_modules=["lm_head"],
        layers_pattern="layers",
        layers_to_transform=1,
        loftq_config={},
        corda_config=None,
        eva_config={"rho": 2.0},
        velora_config={"num_groups": 4},
        runtime_config={"ephemeral_gpu_offload": False},
        a_field_of_the_future={"x": math.nan},
    )
    assert settings_of(modules_to_save=None).r == 8


@pytest.mark.parametrize("targets", ["all-linear", r".*\.(q|v)_proj", "q_proj", None])
def test_target_modules_as_a_string_says_nothing_to_compare(targets: str | None) -> None:
    assert settings_of(target_modules=targets).target_modules is None


FIELDS = [
    "r",
    "lora_alpha",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "target_modules",
    "layers_to_transform",
    "base_model_name_or_path",
    "peft_type",
    "bias",
    "modules_to_save",
    "init_lora_weights",
    "use_dora",
]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["q_proj", "none"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.filterwarnings("ignore:Possible:FutureWarning")
@given(st.dictionaries(st.sampled_from(FIELDS), json_values))
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_values_give_settings_or_problems(config: dict[str, Any]) -> None:
    parsed, problems = parse(**config)
    assert parsed is not None or problems
    if parsed is not None:
        assert math.isfinite(parsed.scale(Q0))


@given(st.binary(max_size=60))
@settings(deadline=None)
def test_any_bytes_give_settings_or_problems(raw: bytes) -> None:
    parsed, problems = parse_config(raw)
    assert parsed is not None or problems


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("depth", [800, 950, 970, 980, 990])
def test_a_value_nested_to_the_limit_is_no_way_to_crash(field: str, depth: int) -> None:
    parsed, problems = parse_config(f'{{"{field}": {"[" * depth}{"]" * depth}}}'.encode())
    assert parsed is not None or problems
