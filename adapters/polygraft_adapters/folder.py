"""What a path holds: an adapter as PEFT saves it, or one of the things people point at instead."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from polygraft_adapters.config import CONFIG_NAME, MAX_CONFIG_BYTES
from polygraft_adapters.types import AdapterError, Problem

WEIGHTS_NAME = "adapter_model.safetensors"
MLX_WEIGHTS_NAME = "adapters.safetensors"
"""What mlx-lm calls its weights."""

_MODEL_CONFIG = "config.json"
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_PICKLE_HINT = (
    "pickles can run code and are never opened; load the adapter with PEFT where you trust it and save it again with "
    "save_pretrained(..., safe_serialization=True)"
)
_CHECKPOINT = re.compile(r"checkpoint-([0-9]{1,18})")


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """The two files of an adapter: its config's bytes and the path of its weights."""

    config: bytes
    weights: Path
    warnings: tuple[str, ...]


def open_folder(path: Path) -> AdapterFolder:
    """Find the files of a PEFT folder. Raises AdapterError that says what the path holds and what to do about it."""
    try:
        return _open_folder(path)
    except OSError as error:
        raise AdapterError([Problem(str(path), f"cannot be read: {error.strerror}")]) from error


def describe_model_folder_problem(path: Path) -> str | None:
    """What to tell somebody whose *model* option points at an adapter; None when `path` does not look like one."""
    try:
        if path.is_file() and path.name == WEIGHTS_NAME:
            return f"{path} is the weights file of a LoRA adapter, not a model. {_serve_hint(path.parent)}"
        if not path.is_dir():
            return None
        if (path / CONFIG_NAME).is_file():
            has_model = (path / _MODEL_CONFIG).is_file() and any(path.glob("model*.safetensors"))
            return None if has_model else f"{path} contains a LoRA adapter, not a model. {_serve_hint(path)}"
        if not (path / _MODEL_CONFIG).is_file() and (inner := _adapters_inside(path)):
            return f"{path} contains LoRA adapters ({_names(inner)}), not a model. {_serve_hint(inner[-1])}"
    except OSError:
        return None  # whoever loads the model will meet the same error and can say more about it
    return None


def _open_folder(path: Path) -> AdapterFolder:
    if path.is_file():
        hint = (
            f"give the folder {path.parent}" if path.suffix == ".safetensors" else f"give a folder with {CONFIG_NAME}"
        )
        raise AdapterError([Problem(str(path), "is a file; an adapter is the folder that PEFT saved", hint)])
    if not path.is_dir():
        problem = "is not a folder" if path.exists() else "no such folder"
        raise AdapterError([Problem(str(path), problem)])
    config = path / CONFIG_NAME
    if not config.is_file():
        raise AdapterError([_without_config(path)])
    weights = path / WEIGHTS_NAME
    pickles = _pickles(path)
    if not weights.is_file():
        raise AdapterError([_without_weights(path, pickles)])
    if config.stat().st_size > MAX_CONFIG_BYTES:
        raise AdapterError([Problem(CONFIG_NAME, f"is larger than {MAX_CONFIG_BYTES} bytes")])
    ignored = [name for name in pickles if name.startswith("adapter_model.")]
    warnings = tuple(f"{name} was ignored: {WEIGHTS_NAME} is beside it" for name in ignored)
    return AdapterFolder(config.read_bytes(), weights, warnings)


def _without_config(path: Path) -> Problem:
    if (path / _MODEL_CONFIG).is_file():
        return Problem(
            CONFIG_NAME,
            f"not there: the folder has a {_MODEL_CONFIG}, so it holds a whole model (merged, perhaps), not an adapter",
            "serve it as the model, or give the folder in which PEFT saved the adapter",
        )
    if inner := _adapters_inside(path):
        return Problem(
            CONFIG_NAME, f"not there, but inside {_names(inner)}", f"give one of them, for instance {inner[-1]}"
        )
    if (path / WEIGHTS_NAME).is_file():
        return Problem(
            CONFIG_NAME, f"not there, only {WEIGHTS_NAME}", "PEFT saves both files; copy the config beside it"
        )
    return Problem(CONFIG_NAME, "not there: this is not a folder that PEFT saved", "save_pretrained() writes one")


def _without_weights(path: Path, pickles: list[str]) -> Problem:
    if pickles:
        return Problem(WEIGHTS_NAME, f"not there, only {', '.join(pickles)}", _PICKLE_HINT)
    if (path / MLX_WEIGHTS_NAME).is_file():
        hint = "upload it, with `polygraft adapter push` for instance: uploads are converted"
        return Problem(WEIGHTS_NAME, f"not there, only {MLX_WEIGHTS_NAME}, which MLX writes", hint)
    others = sorted(file.name for file in path.glob("*.safetensors"))
    if others:
        return Problem(
            WEIGHTS_NAME, f"not there, only {', '.join(others)}", f"rename the adapter's file {WEIGHTS_NAME}"
        )
    return Problem(WEIGHTS_NAME, "not there", "save_pretrained() writes it beside the config")


def _pickles(path: Path) -> list[str]:
    return sorted(file.name for file in path.iterdir() if file.suffix in _PICKLE_SUFFIXES and file.is_file())


def _adapters_inside(path: Path) -> list[Path]:
    """Direct children that are adapters, trainer checkpoints last and in the order of their steps."""
    return sorted((child for child in path.iterdir() if (child / CONFIG_NAME).is_file()), key=_step)


def _step(path: Path) -> tuple[int, str]:
    checkpoint = _CHECKPOINT.fullmatch(path.name)
    return (-1 if checkpoint is None else int(checkpoint.group(1)), path.name)


def _names(paths: list[Path]) -> str:
    return ", ".join(path.name for path in paths)


def _serve_hint(adapter: Path) -> str:
    return f"Give the base model as MODEL, and this adapter as --adapter NAME={adapter}."
