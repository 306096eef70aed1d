"""DoRA and biases: config and tensors agree, or the adapter is refused in words that name the training option."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from polygraft_adapters import AdapterError, ModuleKey, ModuleShapes, Problem, inspect_adapter
from polygraft_adapters.weights import load_adapter

Tensors = dict[str, Tensor]
Write = Callable[..., Path]
Q0 = "base_model.model.model.layers.0.self_attn.q_proj"
DOWN1 = "base_model.model.model.layers.1.mlp.down_proj"
UP0 = "base_model.model.model.layers.0.mlp.up_proj"


@pytest.fixture
def biased(shapes: ModuleShapes) -> ModuleShapes:
    """The same model with biases in its feed-forward part."""
    return replace(shapes, biased=("gate_proj", "up_proj", "down_proj"))


def problems_of(folder: Path, shapes: ModuleShapes) -> list[Problem]:
    with pytest.raises(AdapterError) as caught:
        inspect_adapter(folder, shapes, 16)
    return list(caught.value.problems)


@pytest.mark.parametrize("suffix", ["", ".weight", ".default", ".default.weight"])
def test_magnitudes_bind_under_all_of_their_names(
    write: Write, tensors: Tensors, shapes: ModuleShapes, suffix: str
) -> None:
    tensors |= {f"{module}.lora_magnitude_vector{suffix}": torch.rand(64) for module in (Q0, DOWN1)}
    loaded = load_adapter(write(tensors, use_dora=True), shapes, 16, torch.float32)
    loaded.check()
    assert all(pair.magnitude is not None and pair.magnitude.shape == (64,) for pair in loaded.pairs.values())


def test_dora_in_the_config_without_its_tensors_is_a_disagreement(
    write: Write, tensors: Tensors, shapes: ModuleShapes
) -> None:
    found = problems_of(write(tensors, use_dora=True), shapes)
    assert [problem.where for problem in found] == ["use_dora", f"{Q0}.lora_A.weight", f"{DOWN1}.lora_A.weight"]
    assert "disagree" in found[0].problem
    tensors[f"{Q0}.lora_magnitude_vector"] = torch.ones(64)
    (problem,) = problems_of(write(tensors, use_dora=True), shapes)
    assert problem.where == f"{DOWN1}.lora_A.weight"
    assert "no lora_magnitude_vector" in problem.problem


def test_magnitudes_without_dora_in_the_config_are_a_disagreement(
    write: Write, tensors: Tensors, shapes: ModuleShapes
) -> None:
    tensors[f"{Q0}.lora_magnitude_vector"] = torch.ones(64)
    (problem,) = problems_of(write(tensors), shapes)
    assert problem.where == f"{Q0}.lora_magnitude_vector"
    assert "DoRA" in problem.problem
    assert "use_dora" in problem.hint


def test_biases_of_lora_b_bind_and_agree_with_the_config(write: Write, tensors: Tensors, shapes: ModuleShapes) -> None:
    both = {**tensors, f"{Q0}.lora_B.bias": torch.rand(64), f"{DOWN1}.lora_B.default.bias": torch.rand(64)}
    loaded = load_adapter(write(both, lora_bias=True), shapes, 16, torch.float32)
    loaded.check()
    assert all(pair.bias is not None for pair in loaded.pairs.values())
    found = problems_of(write(both), shapes)
    assert [problem.where for problem in found] == [f"{Q0}.lora_B.bias", f"{DOWN1}.lora_B.default.bias"]
    assert all("lora_bias" in problem.hint for problem in found)
    found = problems_of(write(tensors, lora_bias=True), shapes)
    assert [problem.where for problem in found] == [f"{Q0}.lora_B.weight", f"{DOWN1}.lora_B.weight"]


@pytest.mark.parametrize("name", ["bias", "base_layer.bias"])
@pytest.mark.parametrize("mode", ["all", "lora_only"])
def test_trained_biases_of_the_base_bind(
    write: Write, tensors: Tensors, biased: ModuleShapes, name: str, mode: str
) -> None:
    tensors |= {f"{DOWN1}.{name}": torch.rand(64), f"{UP0}.bias": torch.rand(96)}
    loaded = load_adapter(write(tensors, bias=mode), biased, 16, torch.float32)
    loaded.check()
    assert loaded.biases.keys() == {ModuleKey(1, "down_proj"), ModuleKey(0, "up_proj")}
    assert loaded.info.targets == ("q_proj", "up_proj", "down_proj")
    assert loaded.info.warnings == ()


def test_trained_biases_have_to_fit_the_model_and_the_config(
    write: Write, tensors: Tensors, shapes: ModuleShapes, biased: ModuleShapes
) -> None:
    trained = {**tensors, f"{UP0}.bias": torch.rand(96)}
    (problem,) = problems_of(write(trained, bias="all"), shapes)
    assert "model.layers.0.mlp.up_proj of the served model has none" in problem.problem
    (problem,) = problems_of(write(trained), biased)
    assert 'bias="none"' in problem.problem
    (problem,) = problems_of(write({**tensors, f"{UP0}.bias": torch.rand(64)}, bias="all"), biased)
    assert "needs [96]" in problem.problem


def test_models_without_biases_take_adapters_that_trained_none(
    write: Write, tensors: Tensors, shapes: ModuleShapes, biased: ModuleShapes
) -> None:
    assert inspect_adapter(write(tensors, bias="all"), shapes, 16).warnings == ()
    (warning,) = inspect_adapter(write(tensors, bias="all"), biased, 16).warnings
    assert "no biases" in warning


@pytest.mark.parametrize(("name", "option"), [("lora_magnitude_vector", "use_dora"), ("lora_B.bias", "lora_bias")])
def test_vectors_have_one_number_for_each_output(
    write: Write, tensors: Tensors, shapes: ModuleShapes, name: str, option: str
) -> None:
    tensors |= {f"{Q0}.{name}": torch.rand(32), f"{DOWN1}.{name}": torch.rand(64, 1)}
    first, second = problems_of(write(tensors, **{option: True}), shapes)
    assert "has shape [32]" in first.problem
    assert "has shape [64, 1]" in second.problem


@pytest.mark.parametrize("name", ["lora_magnitude_vector", "lora_B.bias"])
def test_vectors_alone_are_refused(write: Write, tensors: Tensors, shapes: ModuleShapes, name: str) -> None:
    tensors[f"{UP0}.{name}"] = torch.rand(96)
    found = problems_of(write(tensors), shapes)
    assert [problem.problem for problem in found] == ["has no lora_A beside it"]
