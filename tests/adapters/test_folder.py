"""What people point at instead of an adapter, and the words they get."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from polygraft_adapters import AdapterError, ModuleShapes, describe_model_folder_problem, inspect_adapter

Tensors = dict[str, Tensor]
Write = Callable[..., Path]


def message(path: Path, shapes: ModuleShapes) -> str:
    with pytest.raises(AdapterError) as caught:
        inspect_adapter(path, shapes, 16)
    (problem,) = caught.value.problems
    return str(problem)


def test_the_weights_file_itself(write: Write, tensors: Tensors, shapes: ModuleShapes) -> None:
    folder = write(tensors)
    assert f"give the folder {folder}" in message(folder / "adapter_model.safetensors", shapes)
    assert "give a folder with adapter_config.json" in message(folder / "adapter_config.json", shapes)


def test_a_merged_model(tmp_path: Path, shapes: ModuleShapes) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert "whole model (merged, perhaps)" in message(tmp_path, shapes)


def test_a_folder_of_checkpoints_names_the_last_step(tmp_path: Path, shapes: ModuleShapes) -> None:
    for step in (500, 1000, 90):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "adapter_config.json").write_text("{}")
    (tmp_path / "runs").mkdir()
    text = message(tmp_path, shapes)
    assert "checkpoint-90, checkpoint-500, checkpoint-1000" in text
    assert f"for instance {tmp_path / 'checkpoint-1000'}" in text
    assert "runs" not in text.replace(str(tmp_path), "")


def test_nothing_there(tmp_path: Path, shapes: ModuleShapes) -> None:
    assert "no such folder" in message(tmp_path / "missing", shapes)
    assert "not a folder that PEFT saved" in message(tmp_path, shapes)
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "adapter_model.safetensors: not there" in message(tmp_path, shapes)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert "only model.safetensors" in message(tmp_path, shapes)
    (tmp_path / "adapter_config.json").unlink()
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    assert "only adapter_model.safetensors" in message(tmp_path, shapes)


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.mkdir, (self.folder,)


@pytest.mark.parametrize("suffix", [".bin", ".pt"])
def test_pickles_are_never_opened(tmp_path: Path, shapes: ModuleShapes, suffix: str) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / f"adapter_model{suffix}").write_bytes(pickle.dumps(Bomb(tmp_path / "owned")))
    text = message(tmp_path, shapes)
    assert f"only adapter_model{suffix}" in text
    assert "safe_serialization=True" in text
    assert not (tmp_path / "owned").exists()


def test_safetensors_beside_a_pickle_are_used_with_a_warning(
    write: Write, tensors: Tensors, shapes: ModuleShapes, tmp_path: Path
) -> None:
    folder = write(tensors)
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "owned")))
    (folder / "optimizer.pt").write_bytes(b"")
    info = inspect_adapter(folder, shapes, 16)
    assert info.warnings == ("adapter_model.bin was ignored: adapter_model.safetensors is beside it",)
    assert not (tmp_path / "owned").exists()


def test_a_config_of_absurd_size_is_not_read(write: Write, tensors: Tensors, shapes: ModuleShapes) -> None:
    assert "larger than" in message(write(tensors, raw=" " * (8 * 1024 * 1024 + 1)), shapes)


def test_a_model_option_that_points_at_an_adapter_is_explained(write: Write, tensors: Tensors) -> None:
    folder = write(tensors)
    text = describe_model_folder_problem(folder)
    assert text is not None
    assert "contains a LoRA adapter" in text
    assert f"--adapter NAME={folder}" in text
    text = describe_model_folder_problem(folder / "adapter_model.safetensors")
    assert text is not None
    assert f"--adapter NAME={folder}" in text
    text = describe_model_folder_problem(folder.parent)
    assert text is not None
    assert "contains LoRA adapters (adapter1)" in text


def test_a_model_folder_is_left_to_the_model_loader(tmp_path: Path, write: Write, tensors: Tensors) -> None:
    assert describe_model_folder_problem(tmp_path / "org/name-on-the-hub") is None
    assert describe_model_folder_problem(tmp_path) is None
    folder = write(tensors)
    (folder / "config.json").write_text("{}")
    assert describe_model_folder_problem(folder) is not None
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"")
    assert describe_model_folder_problem(folder) is None
