"""From a folder to a decoder; and every folder that is no model gets told what it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engine.bench import Bench, generation, run, write_adapter

from polygraft_engine.build import build_engine
from polygraft_engine.models.checkpoint import contents_digest
from polygraft_engine.models.errors import ModelError
from polygraft_engine.models.loading import resolve_model
from polygraft_engine.options import EngineOptions


def build(folder: Path, **options: object) -> None:
    settings = {"kernels": "reference", "kv_cache_memory": 2**20, "max_loras": 0, **options}
    build_engine(EngineOptions(model=str(folder), **settings), Bench(folder).source())  # type: ignore[arg-type]


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_missing_and_unexpected_and_misshapen_tensors_are_listed(make_model: Callable[..., Path]) -> None:
    folder = make_model()

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.0.self_attn.rotten.weight"] = torch.zeros(1)
        tensors["model.norm.weight"] = torch.ones(63)

    change_weights(folder, spoil)
    with pytest.raises(ModelError) as refused:
        build(folder)
    message = str(refused.value)
    assert "missing: model.layers.1.mlp.up_proj.weight" in message
    assert "unexpected: model.layers.0.self_attn.rotten.weight" in message
    assert "model.norm.weight is [63], not [64]" in message


def test_old_buffers_and_a_tied_heads_copy_are_ignored(make_model: Callable[..., Path]) -> None:
    folder = make_model(tie_word_embeddings=True)

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
        tensors["lm_head.weight"] = torch.zeros(128, 64)

    change_weights(folder, add)
    build(folder)


def test_an_untied_head_must_be_there(make_model: Callable[..., Path]) -> None:
    folder = make_model()
    change_weights(folder, lambda tensors: tensors.__delitem__("lm_head.weight"))
    with pytest.raises(ModelError, match=r"missing: lm_head\.weight"):
        build(folder)


def test_shards_are_read_through_their_index(bench: Bench, make_model: Callable[..., Path]) -> None:
    folder = make_model()
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in halves.items() for name in part}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    asked = [generation("x", bench.prompt(10))]
    assert run(Bench(folder).engine(), asked)["x"] == run(bench.engine(), asked)["x"]
    (folder / "b.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks shards that its index names: b\.safetensors"):
        build(folder)
    index.write_text("{}")
    with pytest.raises(ModelError, match="no index of shards"):
        build(folder)


def test_half_a_file_is_no_model(make_model: Callable[..., Path]) -> None:
    folder = make_model()
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ModelError, match="no whole safetensors file"):
        build(folder)


def test_pickled_weights_are_never_opened(make_model: Callable[..., Path]) -> None:
    folder = make_model()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"only pickled weights \(pytorch_model\.bin\).*save_pretrained"):
        build(folder)


def test_progress_counts_layers(make_model: Callable[..., Path]) -> None:
    folder = make_model()
    seen: list[tuple[int, int]] = []
    options = EngineOptions(model=str(folder), kernels="reference", kv_cache_memory=2**20, max_loras=0)
    build_engine(options, Bench(folder).source(), lambda done, total: seen.append((done, total)))
    assert seen == [(0, 2), (1, 2), (2, 2)]


def test_an_adapter_folder_is_no_model(bench: Bench, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", bench.spec, 1)
    with pytest.raises(ModelError, match="LoRA adapter"):
        resolve_model(str(folder))


def test_other_folders_are_told_what_they_contain(tmp_path: Path, make_model: Callable[..., Path]) -> None:
    with pytest.raises(ModelError, match=r"no config\.json.*it is empty"):
        resolve_model(str(tmp_path))
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ModelError, match=r"it contains model\.gguf"):
        resolve_model(str(tmp_path))
    parent = make_model().parent
    with pytest.raises(ModelError, match="its folders changed do"):
        resolve_model(str(parent))
    with pytest.raises(ModelError, match="is a file; give the folder"):
        resolve_model(str(parent / "changed" / "config.json"))


@pytest.mark.parametrize("path", ["/no/such/folder", "./nowhere", "nowhere", "a/b/c"])
def test_a_path_that_is_not_there_is_named(path: str) -> None:
    with pytest.raises(ModelError, match=f"{path} does not exist"):
        resolve_model(path)


def test_a_hub_id_that_cannot_be_had_offline_says_so() -> None:
    with pytest.raises(ModelError, match="neither a local folder nor in the Hub cache"):
        resolve_model("polygraft-tests/never-published")


def test_a_model_is_told_from_another_by_its_numbers(make_model: Callable[..., Path]) -> None:
    one, two = make_model(), make_model()
    assert contents_digest(one) == contents_digest(two)
    change_weights(two, lambda tensors: tensors["model.layers.1.mlp.up_proj.weight"].add_(0.01))
    assert contents_digest(one) != contents_digest(two)
