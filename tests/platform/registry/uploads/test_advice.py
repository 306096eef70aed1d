"""Problems are told in the words of the tool that trained the adapter."""

from pathlib import Path
from typing import Any

import pytest

from polygraft.registry.uploads.advice import advise, trained_with
from polygraft_adapters.types import Problem

from .making import CONFIG, config_of

RANK = Problem("r", "rank 64 > limit 16, restart with --max-lora-rank 64")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / CONFIG).write_bytes(config_of())
    return tmp_path


@pytest.mark.parametrize(
    ("card", "config", "tool"),
    [
        ("", {}, "PEFT"),
        ("---\ntags:\n- llama-factory\n- lora\n---\n", {}, "LLaMA-Factory"),
        ("[<img alt='Built with Axolotl'>](https://axolotl.ai)", {"base_model_name_or_path": "unsloth/x"}, "axolotl"),
        ("tags:\n- unsloth", {}, "unsloth"),
        ("", {"base_model_name_or_path": "unsloth/Llama-3.2-1B"}, "unsloth"),
        ("", {"auto_mapping": {"unsloth_fixed": True}}, "unsloth"),
        ("", {"fine_tune_type": "lora", "lora_parameters": {"rank": 8}}, "MLX"),
        ("", {"base_model_name_or_path": 5, "auto_mapping": [1]}, "PEFT"),
    ],
)
def test_the_tool_is_told_by_its_traces(folder: Path, card: str, config: Any, tool: str) -> None:
    (folder / CONFIG).write_bytes(config_of(**config))
    (folder / "README.md").write_text(card)
    assert trained_with(folder) == tool


@pytest.mark.parametrize("raw", [b"", b"[]", b"\xff", b"[" * 100_000, b"null"])
def test_a_config_that_is_none_tells_nothing(folder: Path, raw: bytes) -> None:
    (folder / CONFIG).write_bytes(raw)
    assert trained_with(folder) == "PEFT"
    assert trained_with(folder / "nowhere") == "PEFT"


@pytest.mark.parametrize(
    ("card", "setting"),
    [("", "smaller r"), ("axolotl", "lora_r"), ("llama-factory", "lora_rank"), ("unsloth", "get_peft_model")],
)
def test_each_tool_calls_the_rank_its_own_way(folder: Path, card: str, setting: str) -> None:
    (folder / "README.md").write_text(card)
    (found,) = advise(folder, [RANK])
    assert setting in found.hint
    assert (found.where, found.problem, found.kind) == (RANK.where, RANK.problem, RANK.kind)


@pytest.mark.parametrize(
    ("problem", "setting"),
    [
        (Problem("x.lora_A.weight", "has values that are NaN or infinite"), "learning_rate"),
        (Problem("modules_to_save", "whole copies of score are not supported"), "additional_target"),
        (Problem("use_dora", "is true, but the file has no lora_magnitude_vector"), "use_dora: false"),
        (Problem("init_lora_weights", '"pissa" initialisation changes the base model'), "pissa_convert"),
        (Problem("x", "has shape [8, 9], but q_proj needs [r, 4]"), "model_name_or_path"),
        (Problem("x", "has shape [0] instead of two dimensions"), "stage3_gather_16bit_weights_on_model_save"),
        (Problem("adapter_config.json", "not there"), "output_dir"),
        (Problem("adapter_model.safetensors", "not there, only adapter_model.bin"), "pickles"),
    ],
)
def test_the_settings_of_one_tool(folder: Path, problem: Problem, setting: str) -> None:
    (folder / "README.md").write_text("tags: [llama-factory]")
    (found,) = advise(folder, [problem])
    assert found.hint.startswith("in LLaMA-Factory: ")
    assert setting in found.hint


def test_what_nobody_has_advice_for_keeps_its_own(folder: Path) -> None:
    (folder / "README.md").write_text("axolotl")
    problem = Problem("lora_alpha", "is true, not a number", "write a number")
    assert advise(folder, [problem]) == [problem]
