"""load_adapter against PEFT itself: scale * B A is the delta that PEFT adds."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from polygraft_adapters import TARGETS, AdapterError, ModuleKey, ModuleShapes, inspect_adapter
from polygraft_adapters.weights import AdapterWeights, load_adapter

Tensors = dict[str, Tensor]
Write = Callable[..., Path]


@pytest.fixture
def llama(shapes: ModuleShapes) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=shapes.shapes["q_proj"][1],
        intermediate_size=shapes.shapes["gate_proj"][0],
        num_hidden_layers=shapes.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).float()


def peft_deltas(model: PeftModel) -> Iterator[tuple[str, Tensor]]:
    for name, module in model.base_model.model.named_modules():
        if hasattr(module, "get_delta_weight"):
            yield name, module.get_delta_weight("default")


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj"], "r": 16, "lora_alpha": 16, "use_rslora": True},
        {"target_modules": "all-linear", "r": 8, "lora_alpha": 16},
        {"target_modules": r".*\.(q|v)_proj", "r": 4, "lora_alpha": 0.5},
        {"target_modules": list(TARGETS), "r": 3},
        {"target_modules": ["self_attn.q_proj", "mlp.gate_proj", "layers.1.mlp.down_proj"]},
        {"target_modules": ["o_proj", "down_proj"], "layers_to_transform": 1, "layers_pattern": "layers"},
        {
            "target_modules": list(TARGETS),
            "r": 8,
            "lora_alpha": 16,
            "rank_pattern": {r"layers\.1\..*": 5, "model.layers.0.mlp.up_proj": 12, "q_proj": 2},
            "alpha_pattern": {"^model.layers.0.self_attn.v_proj": 3, "mlp.(gate|up)_proj": 1.5},
        },
        {
            "target_modules": list(TARGETS),
            "use_rslora": True,
            "rank_pattern": {"layers.0.self_attn.q_proj": 7, "q_proj": 2, "v_proj": 6},
            "alpha_pattern": {"down_proj": 32, "layers.1.mlp.down_proj": 2},
        },
    ],
)
def test_deltas_equal_those_of_peft(
    llama: LlamaForCausalLM, shapes: ModuleShapes, tmp_path: Path, options: dict[str, Any]
) -> None:
    model = get_peft_model(llama, LoraConfig(init_lora_weights=False, **options))
    model.save_pretrained(tmp_path)
    # Read back, for PEFT saves the patterns in sorted order, which may not be the order that training used.
    expected = dict(peft_deltas(PeftModel.from_pretrained(model.unload(), tmp_path)))
    loaded = load_adapter(tmp_path, shapes, 16, torch.float32)
    loaded.check()
    assert {key.path for key in loaded.pairs} == set(expected)
    for key, pair in loaded.pairs.items():
        torch.testing.assert_close(pair.scale * (pair.b @ pair.a), expected[key.path], rtol=1e-6, atol=1e-6)
    assert loaded.info == inspect_adapter(tmp_path, shapes, 16)


def test_an_adapter_infix_loads_the_same_numbers(write: Write, tensors: Tensors, shapes: ModuleShapes) -> None:
    plain = load_adapter(write(tensors), shapes, 16, torch.float32)
    infix = {name.replace(".weight", ".default.weight"): tensor for name, tensor in tensors.items()}
    named = load_adapter(write(infix), shapes, 16, torch.float32)
    assert plain.pairs.keys() == named.pairs.keys()
    for key, pair in plain.pairs.items():
        assert torch.equal(pair.a, named.pairs[key].a)
        assert torch.equal(pair.b, named.pairs[key].b)


@pytest.mark.filterwarnings("ignore:PiSSA changes the base weights")
def test_a_converted_pissa_adapter_loads(llama: LlamaForCausalLM, shapes: ModuleShapes, tmp_path: Path) -> None:
    model = get_peft_model(llama, LoraConfig(init_lora_weights="pissa", r=4, lora_alpha=4, target_modules=["q_proj"]))
    model.save_pretrained(tmp_path / "raw")
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(tmp_path / "initial")
    model.peft_config["default"].init_lora_weights = "pissa"
    with pytest.raises(AdapterError, match="path_initial_model_for_weight_conversion"):
        inspect_adapter(tmp_path / "raw", shapes, 16)
    model.save_pretrained(tmp_path / "converted", path_initial_model_for_weight_conversion=str(tmp_path / "initial"))
    loaded = load_adapter(tmp_path / "converted", shapes, 16, torch.float32)
    assert loaded.info.rank == 8
    for pair in loaded.pairs.values():  # nothing was trained, so that the whole delta is zero
        assert (pair.b @ pair.a).abs().max() < 1e-5


@pytest.mark.parametrize("saved", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("served", [torch.float32, torch.float16, torch.bfloat16])
def test_tensors_are_converted_and_the_scale_is_kept_apart(
    write: Write, tensors: Tensors, shapes: ModuleShapes, saved: torch.dtype, served: torch.dtype
) -> None:
    stored = {name: tensor.to(saved) for name, tensor in tensors.items()}
    loaded = load_adapter(write(stored, lora_alpha=16), shapes, 16, served)
    loaded.check()
    pair = loaded.pairs[ModuleKey(0, "q_proj")]
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    assert torch.equal(pair.a, stored[f"{name}.lora_A.weight"].to(served))
    assert torch.equal(pair.b, stored[f"{name}.lora_B.weight"].to(served))
    assert pair.scale == 2.0
    assert loaded.nbytes == sum(tensor.numel() for tensor in tensors.values()) * served.itemsize


def test_loading_twice_gives_equal_but_separate_weights(write: Write, tensors: Tensors, shapes: ModuleShapes) -> None:
    folder = write(tensors)

    def load() -> AdapterWeights:
        return load_adapter(folder, shapes, 16, torch.float32)

    first, second = load(), load()
    assert first.info == second.info
    key = ModuleKey(0, "q_proj")
    assert torch.equal(first.pairs[key].a, second.pairs[key].a)
    assert first.pairs[key].a.data_ptr() != second.pairs[key].a.data_ptr()
    with pytest.raises(TypeError):
        first.pairs[key] = second.pairs[key]  # type: ignore[index]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_refused_by_tensor(
    write: Write, tensors: Tensors, shapes: ModuleShapes, value: float
) -> None:
    names = sorted(tensors)[:2]
    for name in names:
        tensors[name][1, 2] = value
    folder = write(tensors)
    for read in (lambda: inspect_adapter(folder, shapes, 16), lambda: load_adapter(folder, shapes, 16, torch.bfloat16)):
        with pytest.raises(AdapterError) as caught:
            read()
        assert [problem.where for problem in caught.value.problems] == names
        assert "NaN or infinite" in str(caught.value)


def test_values_beyond_the_served_dtype_are_refused(write: Write, tensors: Tensors, shapes: ModuleShapes) -> None:
    name = sorted(tensors)[0]
    tensors[name][0, 0] = 1e5
    folder = write(tensors)
    with pytest.raises(AdapterError, match="float16 cannot hold"):
        load_adapter(folder, shapes, 16, torch.float16)
    load_adapter(folder, shapes, 16, torch.bfloat16).check()


def test_a_truncated_file_is_refused(write: Write, tensors: Tensors, shapes: ModuleShapes) -> None:
    folder = write(tensors)
    os.truncate(folder / "adapter_model.safetensors", 1000)
    with pytest.raises(AdapterError, match="truncated"):
        load_adapter(folder, shapes, 16, torch.float32)
