"""A folder's safetensors files as one set of named tensors, bound to what a ModelSpec expects."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from polygraft_adapters.types import ModuleKey
from polygraft_engine.models.architecture import ModelSpec
from polygraft_engine.models.errors import ModelError

SHOWN = 8
"""How many of a kind an error lists before it only counts."""

HEADER_LENGTH_BYTES = 8
SAMPLE_BYTES = 4096


def expected_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor the model needs, by its Hugging Face name, with its shape."""
    expected: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (spec.vocab, spec.hidden),
        "model.norm.weight": (spec.hidden,),
    }
    if not spec.tied:
        expected["lm_head.weight"] = (spec.vocab, spec.hidden)
    for layer in range(spec.layers):
        prefix = f"model.layers.{layer}"
        for target, shape in spec.module_shapes("").shapes.items():
            module = ModuleKey(layer, target).path
            expected[f"{module}.weight"] = shape
            if spec.is_biased(target):
                expected[f"{module}.bias"] = shape[:1]
        for norm in ("input_layernorm", "post_attention_layernorm"):
            expected[f"{prefix}.{norm}.weight"] = (spec.hidden,)
        if spec.qk_norm:
            for norm in ("q_norm", "k_norm"):
                expected[f"{prefix}.self_attn.{norm}.weight"] = (spec.head_dim,)
    return expected


@dataclass(frozen=True, slots=True)
class _Entry:
    file: Path
    shape: tuple[int, ...]


class Checkpoint:
    """An open folder of weights. Tensors are read one at a time from memory-mapped files.

    Use as a context manager. `take` gives each tensor once; `finish` asserts that all were taken.
    """

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        """Raises ModelError that lists what is missing, unexpected or misshapen."""
        self._files = weight_files(folder)
        self._entries = _read_entries(self._files)
        _compare(folder, self._entries, expected_tensors(spec), spec)
        self._left = set(expected_tensors(spec))
        self._stack = ExitStack()
        self._handles: dict[Path, Any] = {}

    def __enter__(self) -> Self:
        for file in self._files:
            self._handles[file] = self._stack.enter_context(safe_open(file, framework="pt", device="cpu"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handles.clear()
        self._stack.close()

    def take(self, name: str, dtype: torch.dtype) -> Tensor:
        """The tensor `name` in `dtype`."""
        assert name in self._left, f"{name} is not expected, or was taken before"
        self._left.remove(name)
        tensor: Tensor = self._handles[self._entries[name].file].get_tensor(name)
        if not tensor.is_floating_point():
            raise ModelError(f"{name} is stored as {tensor.dtype}, not as floating point")
        return tensor.to(dtype)

    def finish(self) -> None:
        """Assert that every expected tensor has been taken."""
        assert not self._left, f"never bound: {sorted(self._left)[:SHOWN]}"


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold the model: those of the index, or model.safetensors, or the only one there is.

    Raises ModelError when there are none, with what is there instead.
    """
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelError(f"{index} is no index of shards: {error!r}") from None
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ModelError(f"{folder} lacks shards that its index names: {', '.join(missing)}; download it again")
        return [folder / name for name in names]
    if single.is_file():
        return [single]
    others = sorted(folder.glob("*.safetensors"))
    if len(others) == 1:
        return others
    pickled = sorted(path.name for path in (*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")))
    if pickled:
        raise ModelError(
            f"{folder} holds only pickled weights ({', '.join(pickled[:SHOWN])}), which can run code when read; "
            "convert them with transformers: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
        )
    what = (
        f"{len(others)} safetensors files but no model.safetensors.index.json" if others else "no safetensors weights"
    )
    raise ModelError(f"{folder} holds {what}; a model folder has model.safetensors or shards with their index")


def contents_digest(folder: Path) -> str:
    """A short hex digest that tells models apart: config.json, and of each weight file its header and a page from
    the middle of every tensor. Reads a few MB of any model.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in weight_files(folder):
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(HEADER_LENGTH_BYTES), "little")
            header = stream.read(length)
            digest.update(header)
            for name, entry in sorted(json.loads(header).items()):
                if name != "__metadata__":
                    first, last = entry["data_offsets"]
                    stream.seek(HEADER_LENGTH_BYTES + length + (first + last) // 2)
                    digest.update(stream.read(min(SAMPLE_BYTES, (last - first + 1) // 2)))
    return digest.hexdigest()[:16]


def _read_entries(files: list[Path]) -> dict[str, _Entry]:
    entries: dict[str, _Entry] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt", device="cpu") as handle:
                for name in handle.keys():  # noqa: SIM118  (a handle is no mapping)
                    if name in entries:
                        raise ModelError(f"{name} is in both {entries[name].file.name} and {file.name}")
                    entries[name] = _Entry(file, tuple(handle.get_slice(name).get_shape()))
        except SafetensorError as error:
            raise ModelError(f"{file} is no whole safetensors file: {error}; download it again") from None
    return entries


def _compare(
    folder: Path, found: Mapping[str, _Entry], expected: Mapping[str, tuple[int, ...]], spec: ModelSpec
) -> None:
    missing = sorted(set(expected) - set(found))
    unexpected = sorted(name for name in set(found) - set(expected) if not _ignorable(name, spec))
    misshapen = [
        f"{name} is {list(found[name].shape)}, not {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name].shape != shape
    ]
    problems = [
        f"{title}: {_listed(names)}"
        for title, names in (("missing", missing), ("unexpected", unexpected), ("misshapen", misshapen))
        if names
    ]
    if problems:
        raise ModelError(f"the weights in {folder} do not fit {spec.architecture}: " + "; ".join(problems))


def _ignorable(name: str, spec: ModelSpec) -> bool:
    """Buffers that old checkpoints stored and every loader computes anew, and a tied head's second copy."""
    return name.endswith(".rotary_emb.inv_freq") or (spec.tied and name == "lm_head.weight")


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:SHOWN])
    return shown if len(names) <= SHOWN else f"{shown} and {len(names) - SHOWN} more"
