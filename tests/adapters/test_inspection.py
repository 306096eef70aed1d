"""inspect_adapter: every tensor binds to a module, or the adapter is refused with the whole list."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from polygraft_adapters import AdapterError, ModuleShapes, Problem, inspect_adapter

Tensors = dict[str, Tensor]
Write = Callable[..., Path]
Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


def problems_of(folder: Path, shapes: ModuleShapes, max_rank: int = 16) -> list[Problem]:
    with pytest.raises(AdapterError) as caught:
        inspect_adapter(folder, shapes, max_rank)
    return list(caught.value.problems)


def test_tells_what_a_valid_adapter_is(write: Write, tensors: Tensors, shapes: ModuleShapes) -> None:
    info = inspect_adapter(write(tensors, r=8, lora_alpha=4), shapes, 16)
    assert info.digest.startswith("sha256:")
    assert len(info.digest) == len("sha256:") + 64
    assert (info.rank, info.scale, info.targets) == (8, 0.5, ("q_proj", "down_proj"))
    assert info.size_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert (info.base_model, info.warnings) == ("org/tiny", ())


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name.replace(".weight", ".default.weight"),
        lambda name: name.replace(".weight", ".my-adapter_2.weight"),
        lambda name: name.removeprefix("base_model.model."),
        lambda name: name.removeprefix("base_model.model.model."),
        lambda name: "base_model.model." + name,
        lambda name: "module._orig_mod." + name,
    ],
)
def test_names_with_an_adapter_infix_or_other_prefixes_bind(
    write: Write, tensors: Tensors, shapes: ModuleShapes, rename: Callable[[str], str]
) -> None:
    info = inspect_adapter(write({rename(name): tensor for name, tensor in tensors.items()}), shapes, 16)
    assert info.targets == ("q_proj", "down_proj")


@pytest.mark.parametrize(
    "targets",
    [
        "all-linear",
        r".*\.(q|down)_proj",
        "q_proj",
        ["q_proj", "down_proj"],
        ["self_attn.q_proj", "mlp.down_proj"],
        ["layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"],
        None,
    ],
)
def test_target_modules_in_every_form_is_information_only(
    write: Write, tensors: Tensors, shapes: ModuleShapes, targets: Any
) -> None:
    extra = {"exclude_modules": ["lm_head"], "layers_to_transform": [0, 1], "layers_pattern": "layers"}
    info = inspect_adapter(write(tensors, target_modules=targets, **extra), shapes, 16)
    assert (info.targets, info.warnings) == (("q_proj", "down_proj"), ())


def test_a_listed_target_without_tensors_is_a_warning(write: Write, tensors: Tensors, shapes: ModuleShapes) -> None:
    info = inspect_adapter(write(tensors, target_modules=["q_proj", "down_proj", "k_proj", "attn.q_proj"]), shapes, 16)
    assert info.warnings == ("target_modules names attn.q_proj, k_proj, but the file has no tensors for it",)


def test_another_base_model_of_the_same_shape_is_a_warning(
    write: Write, tensors: Tensors, shapes: ModuleShapes
) -> None:
    info = inspect_adapter(write(tensors, base_model_name_or_path="org/other"), shapes, 16)
    (warning,) = info.warnings
    assert "org/other" in warning
    assert "org/tiny" in warning
    for same in ("/models/Tiny/", "tiny", None):
        assert inspect_adapter(write(tensors, base_model_name_or_path=same), shapes, 16).warnings == ()


def test_an_adapter_of_a_larger_sibling_is_refused_with_both_shapes(write: Write, shapes: ModuleShapes) -> None:
    folder = write({f"{Q0}.lora_A.weight": torch.zeros(8, 128), f"{Q0}.lora_B.weight": torch.zeros(128, 8)})
    a, b = problems_of(folder, shapes)
    assert "[8, 128]" in a.problem
    assert "model.layers.0.self_attn.q_proj needs [r, 64]" in a.problem
    assert "[128, 8]" in b.problem
    assert "needs [64, r]" in b.problem


def test_all_that_is_wrong_is_listed(write: Write, tensors: Tensors, shapes: ModuleShapes) -> None:
    layers = "base_model.model.model.layers"
    strangers = {
        f"{layers}.2.self_attn.q_proj.lora_A.weight": "0 to 1",
        f"{layers}.0.mlp.q_proj.lora_A.weight": "no module mlp.q_proj",
        f"{layers}.0.self_attn.qkv_proj.lora_A.weight": "no module self_attn.qkv_proj",
        f"{layers}.00.self_attn.v_proj.lora_A.weight": "no module of the model",
        f"{layers}.0.self_attn.v_proj.lora_C.weight": "neither lora_A nor lora_B",
        "something.else": "neither lora_A nor lora_B",
    }
    found = problems_of(write({**tensors, **{name: torch.zeros(8, 64) for name in strangers}}), shapes)
    assert {problem.where for problem in found} == set(strangers)
    for problem in found:
        assert strangers[problem.where] in problem.problem


@pytest.mark.parametrize("side", ["A", "B"])
def test_half_a_pair_is_refused(write: Write, tensors: Tensors, shapes: ModuleShapes, side: str) -> None:
    del tensors[f"{Q0}.lora_{side}.weight"]
    (problem,) = problems_of(write(tensors), shapes)
    assert problem.problem == f"has no lora_{side} beside it"


def test_two_tensors_for_one_place_are_refused(write: Write, tensors: Tensors, shapes: ModuleShapes) -> None:
    tensors[f"{Q0}.lora_A.default.weight"] = tensors[f"{Q0}.lora_A.weight"].clone()
    (problem,) = problems_of(write(tensors), shapes)
    assert "second lora_A" in problem.problem


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn])
def test_other_dtypes_are_refused_by_name(
    write: Write, tensors: Tensors, shapes: ModuleShapes, dtype: torch.dtype
) -> None:
    tensors[f"{Q0}.lora_A.weight"] = tensors[f"{Q0}.lora_A.weight"].to(dtype)
    (problem,) = problems_of(write(tensors), shapes)
    assert "has dtype" in problem.problem


@pytest.mark.parametrize("shape", [(8 * 64,), (0, 64), (0,), (1, 8, 64)])
def test_shards_that_were_never_gathered_are_recognised(
    write: Write, tensors: Tensors, shapes: ModuleShapes, shape: tuple[int, ...]
) -> None:
    tensors[f"{Q0}.lora_A.weight"] = torch.zeros(shape)
    (problem,) = problems_of(write(tensors), shapes)
    assert "ZeRO-3" in problem.hint


@pytest.mark.parametrize("name", [f"{Q0}.lora_A.weight", "base_model.model.lm_head.weight"])
def test_a_tensor_without_dimensions_is_called_a_single_number(
    write: Write, tensors: Tensors, shapes: ModuleShapes, name: str
) -> None:
    tensors[name] = torch.tensor(0.5)
    (problem,) = problems_of(write(tensors, modules_to_save=["lm_head"] if "lm_head" in name else None), shapes)
    assert (problem.where, problem.problem) == (name, "is a single number instead of a matrix")
    assert "ZeRO-3" not in problem.hint


def test_ranks_must_agree_with_each_other_and_the_config(write: Write, tensors: Tensors, shapes: ModuleShapes) -> None:
    (problem, other) = problems_of(write(tensors, r=4), shapes)
    assert problem == Problem(
        "model.layers.0.self_attn.q_proj", "has rank 8 in the file and 4 in the config", problem.hint, "tensor"
    )
    assert other.where == "model.layers.1.mlp.down_proj"
    (problem,) = problems_of(write(tensors, rank_pattern={"down_proj": 4}), shapes)
    assert problem.where == "model.layers.1.mlp.down_proj"
    tensors[f"{Q0}.lora_B.weight"] = torch.zeros(64, 4)
    (problem,) = problems_of(write(tensors), shapes)
    assert problem.problem == "lora_A has rank 8 and lora_B has rank 4"


def test_a_rank_above_the_limit_says_how_to_raise_it(write: Write, shapes: ModuleShapes) -> None:
    def folder(rank: int) -> Path:
        pair = {f"{Q0}.lora_A.weight": torch.zeros(rank, 64), f"{Q0}.lora_B.weight": torch.zeros(64, rank)}
        return write(pair, r=rank)

    assert inspect_adapter(folder(3), shapes, 16).rank == 3
    assert inspect_adapter(folder(16), shapes, 16).rank == 16
    (problem,) = problems_of(folder(64), shapes)
    assert problem.problem == "rank 64 > limit 16, restart with --max-lora-rank 64"


def test_an_empty_file_is_refused(write: Write, shapes: ModuleShapes) -> None:
    (problem,) = problems_of(write({}), shapes)
    assert problem.where == "tensors"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (f"{Q0}.weight", "modules_to_save"),
        (f"{Q0}.base_layer.weight", "modules_to_save"),
        (f"{Q0}.modules_to_save.weight", "modules_to_save"),
        (f"{Q0}.lora_embedding_A", "modules_to_save"),
        ("base_model.model.score.modules_to_save.weight", "modules_to_save"),
        ("base_model.model.model.norm.original_module.weight", "modules_to_save"),
    ],
)
def test_whole_copies_of_other_modules_are_refused_by_name(
    write: Write, tensors: Tensors, shapes: ModuleShapes, name: str, words: str
) -> None:
    (problem,) = problems_of(write({**tensors, name: torch.ones(64)}), shapes)
    assert (problem.where, problem.kind) == (name, "tensor")
    assert words in str(problem)
    assert problem.hint


def test_a_problem_tells_a_tensor_from_a_field(write: Write, tensors: Tensors, shapes: ModuleShapes) -> None:
    found = problems_of(write({**tensors, "stranger": torch.ones(1)}, init_lora_weights="olora", r=4), shapes)
    assert {problem.where: problem.kind for problem in found} == {
        "init_lora_weights": "field",
        "stranger": "tensor",
        "model.layers.0.self_attn.q_proj": "tensor",
        "model.layers.1.mlp.down_proj": "tensor",
    }


@pytest.mark.parametrize(
    ("field", "value"),
    [("fan_in_fan_out", True), ("init_lora_weights", "olora"), ("modules_to_save", ["lm_head"])],
)
def test_the_config_alone_is_reason_enough(
    write: Write, tensors: Tensors, shapes: ModuleShapes, field: str, value: Any
) -> None:
    assert [problem.where for problem in problems_of(write(tensors, **{field: value}), shapes)] == [field]


def test_a_truncated_file_is_refused_together_with_the_config(
    write: Write, tensors: Tensors, shapes: ModuleShapes
) -> None:
    folder = write(tensors, r=0)
    weights = folder / "adapter_model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1)
    found = problems_of(folder, shapes)
    assert [problem.where for problem in found] == ["r", "adapter_model.safetensors"]
    assert "truncated" in found[1].problem


def test_an_unreadable_config_is_refused(write: Write, tensors: Tensors, shapes: ModuleShapes) -> None:
    (problem,) = problems_of(write(tensors, raw="{"), shapes)
    assert problem.where == "adapter_config.json"


def test_the_digest_names_the_maths_and_nothing_else(write: Write, tensors: Tensors, shapes: ModuleShapes) -> None:
    def digest(changed: Tensors | None = None, **config: Any) -> str:
        return inspect_adapter(write(tensors if changed is None else changed, **config), shapes, 64).digest

    same = digest()
    assert digest(lora_alpha=16.0, lora_dropout=0.1, target_modules="all-linear", future=1) == same
    assert digest(dict(reversed(tensors.items()))) == same
    one_bit = {name: tensor.clone() for name, tensor in tensors.items()}
    one_bit[f"{Q0}.lora_A.weight"][0, 0] += 1e-3
    different = [
        digest(one_bit),
        digest({name: tensor.bfloat16() for name, tensor in tensors.items()}),
        digest({name: tensor.half().view(torch.int16).view(torch.bfloat16) for name, tensor in tensors.items()}),
        digest({name: tensor.half() for name, tensor in tensors.items()}),
        digest({name.replace("layers.1", "layers.0"): tensor for name, tensor in tensors.items()}),
        digest(lora_alpha=8),
        digest(use_rslora=True),
        digest(rank_pattern={"q_proj": 8}),
        digest(alpha_pattern={"q_proj": 8}),
        digest(alpha_pattern={"q_proj": 8, "proj": 4}),
        digest(alpha_pattern={"proj": 4, "q_proj": 8}),
    ]
    assert len({same, *different}) == len(different) + 1
