"""MLX adapters become PEFT's: the delta is scale * (a b) transposed, and nothing but lora and dora is converted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from polygraft_adapters import AdapterError, ModuleKey, ModuleShapes, Problem, inspect_adapter
from polygraft_adapters.mlx import convert, is_mlx
from polygraft_adapters.weights import load_adapter

Q0, DOWN1 = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"


def mlx_tensors(rank: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        f"{Q0}.lora_a": torch.randn(64, rank, generator=generator),
        f"{Q0}.lora_b": torch.randn(rank, 64, generator=generator),
        f"{DOWN1}.lora_a": torch.randn(96, rank, generator=generator),
        f"{DOWN1}.lora_b": torch.randn(rank, 64, generator=generator),
    }


def write(folder: Path, tensors: dict[str, Tensor], raw: bytes | None = None, **config: Any) -> Path:
    plain = {
        "fine_tune_type": "lora",
        "num_layers": 16,
        "model": "org/tiny",
        "lora_parameters": {"rank": 4, "dropout": 0.0, "scale": 20.0},
    }
    folder.mkdir()
    (folder / "adapter_config.json").write_bytes(json.dumps({**plain, **config}).encode() if raw is None else raw)
    save_file(tensors, folder / "adapters.safetensors")
    return folder


def converted(tmp_path: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    target = tmp_path / "peft"
    convert(write(tmp_path / "mlx", tensors, **config), target)
    return target


def problems_of(tmp_path: Path, tensors: dict[str, Tensor], **config: Any) -> list[Problem]:
    with pytest.raises(AdapterError) as caught:
        converted(tmp_path, tensors, **config)
    assert not (tmp_path / "peft" / "adapter_config.json").exists()
    return list(caught.value.problems)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("parameters", "scale"),
    [
        ({"rank": 4, "scale": 20.0, "dropout": 0.0}, 20.0),
        ({"rank": 4, "scale": 10, "alpha": 16}, 40.0),
        ({"rank": 4, "scale": 0.3, "keys": ["self_attn.q_proj"]}, 0.3),
    ],
)
def test_deltas_are_those_of_mlx(
    tmp_path: Path, shapes: ModuleShapes, dtype: torch.dtype, parameters: dict[str, Any], scale: float
) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in mlx_tensors().items()}
    folder = converted(tmp_path, tensors, lora_parameters=parameters)
    loaded = load_adapter(folder, shapes, 16, torch.float32)
    loaded.check()
    assert loaded.info == inspect_adapter(folder, shapes, 16)
    assert loaded.info.warnings == ()
    for key, module in ((ModuleKey(0, "q_proj"), Q0), (ModuleKey(1, "down_proj"), DOWN1)):
        pair = loaded.pairs[key]
        x = torch.randn(3, pair.a.shape[1], dtype=torch.float64)
        a, b = (tensors[f"{module}.{side}"].double() for side in ("lora_a", "lora_b"))
        torch.testing.assert_close(pair.scale * (x @ pair.a.double().T @ pair.b.double().T), scale * (x @ a) @ b)


def test_dora_keeps_its_magnitudes(tmp_path: Path, shapes: ModuleShapes) -> None:
    tensors = {**mlx_tensors(), f"{Q0}.m": torch.rand(64), f"{DOWN1}.m": torch.rand(64)}
    loaded = load_adapter(converted(tmp_path, tensors, fine_tune_type="dora"), shapes, 16, torch.float32)
    magnitude = loaded.pairs[ModuleKey(0, "q_proj")].magnitude
    assert magnitude is not None
    assert torch.equal(magnitude, tensors[f"{Q0}.m"])


def test_the_head_is_a_module_like_others(tmp_path: Path, shapes: ModuleShapes) -> None:
    tensors = {"lm_head.lora_a": torch.rand(64, 4), "lm_head.lora_b": torch.rand(4, 32)}
    assert inspect_adapter(converted(tmp_path, tensors), shapes, 16).targets == ("lm_head",)


def test_the_same_adapter_has_the_same_digest(tmp_path: Path, shapes: ModuleShapes) -> None:
    first = converted(tmp_path, mlx_tensors())
    peft = {
        f"base_model.model.{name.replace('lora_a', 'lora_A').replace('lora_b', 'lora_B')}.weight": tensor.T.contiguous()
        for name, tensor in mlx_tensors().items()
    }
    assert {name: tensor.tolist() for name, tensor in load_file(first / "adapter_model.safetensors").items()} == {
        name: tensor.tolist() for name, tensor in peft.items()
    }
    second = tmp_path / "by-hand"
    second.mkdir()
    (second / "adapter_config.json").write_text('{"r": 4, "lora_alpha": 80}')
    save_file(peft, second / "adapter_model.safetensors")
    assert inspect_adapter(first, shapes, 16).digest == inspect_adapter(second, shapes, 16).digest


@pytest.mark.parametrize(
    ("config", "where"),
    [
        ({"fine_tune_type": "full"}, "fine_tune_type"),
        ({"fine_tune_type": 5}, "fine_tune_type"),
        ({"lora_parameters": None}, "lora_parameters"),
        ({"lora_parameters": {"scale": 20.0}}, "lora_parameters.rank"),
        ({"lora_parameters": {"rank": 0, "scale": 20.0}}, "lora_parameters.rank"),
        ({"lora_parameters": {"rank": 4}}, "lora_parameters.scale"),
        ({"lora_parameters": {"rank": 4, "scale": float("nan")}}, "lora_parameters.scale"),
        ({"lora_parameters": {"rank": 4, "scale": 1, "alpha": "x"}}, "lora_parameters.alpha"),
        ({"raw": b"{"}, "adapter_config.json"),
        ({"raw": b"[]"}, "adapter_config.json"),
        ({"raw": b"\xff"}, "adapter_config.json"),
    ],
)
def test_impossible_configs_are_refused_by_field(tmp_path: Path, config: dict[str, Any], where: str) -> None:
    (problem,) = problems_of(tmp_path, mlx_tensors(), **config)
    assert problem.where == where


def test_every_tensor_that_is_no_lora_is_refused_by_name(tmp_path: Path) -> None:
    strangers = {
        f"{Q0}.weight": torch.rand(4),
        f"{Q0}.m": torch.rand(64),
        "model.embed_tokens.lora_a": torch.rand(32, 4),
        "model.layers.0.mlp.switch_mlp.up_proj.lora_a": torch.rand(2, 4, 64),
        "model.layers.0.mlp.up_proj.lora_a": torch.zeros(64, 4, dtype=torch.int8),
        "model.layers.0.mlp.up_proj.lora_b": torch.tensor(0.5),
    }
    found = problems_of(tmp_path, {**mlx_tensors(), **strangers})
    assert {problem.where for problem in found} == strangers.keys()
    assert all(problem.kind == "tensor" for problem in found)
    assert [problem.where for problem in found if "experts" in problem.hint] == [
        "model.layers.0.mlp.switch_mlp.up_proj.lora_a"
    ]


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "mlx", mlx_tensors())
    weights = folder / "adapters.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(AdapterError, match="truncated"):
        convert(folder, tmp_path / "peft")
    weights.unlink()
    with pytest.raises(AdapterError, match="cannot be converted"):
        convert(folder, tmp_path / "peft")


def test_folders_of_mlx_are_recognised(tmp_path: Path, shapes: ModuleShapes) -> None:
    folder = write(tmp_path / "mlx", mlx_tensors())
    assert is_mlx(folder)
    convert(folder, tmp_path / "peft")
    assert not is_mlx(tmp_path / "peft")
    with pytest.raises(AdapterError, match="which MLX writes"):
        inspect_adapter(folder, shapes, 16)


def test_numbers_are_moved_and_not_looked_at(tmp_path: Path) -> None:
    tensors = mlx_tensors()
    tensors[f"{Q0}.lora_a"][0, 0] = float("nan")
    folder = converted(tmp_path, tensors)
    saved = load_file(folder / "adapter_model.safetensors")[f"base_model.model.{Q0}.lora_A.weight"]
    assert np.array_equal(saved.numpy(), tensors[f"{Q0}.lora_a"].numpy().T, equal_nan=True)
