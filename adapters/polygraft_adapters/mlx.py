"""What mlx-lm trains, written as PEFT would: the same numbers, transposed.

MLX computes y + scale * (x a) b with a [in, r] and b [r, out], in `adapters.safetensors` under the module's name; DoRA
has m [out] beside them, which is PEFT's magnitude. The config's `lora_parameters` hold rank and scale, and of old
versions an alpha, with which the scale is scale * alpha / rank. (mlx-lm, tuner/lora.py, dora.py and utils.py.)
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from polygraft_adapters.config import CONFIG_NAME, MAX_CONFIG_BYTES, MAX_RANK
from polygraft_adapters.folder import MLX_WEIGHTS_NAME, WEIGHTS_NAME
from polygraft_adapters.header import ITEM_BYTES, TensorEntry, read_header
from polygraft_adapters.pairs import about
from polygraft_adapters.types import EMBEDDING, AdapterError, Problem
from polygraft_adapters.wording import said, shown

_NAME = re.compile(r"((?:[A-Za-z_][A-Za-z_0-9]*|[0-9]+)(?:\.(?:[A-Za-z_][A-Za-z_0-9]*|[0-9]+))*)\.(lora_a|lora_b|m)")
_PEFT_NAMES = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "m": "lora_magnitude_vector"}
_INTEGERS: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
"""By size: numbers are moved, never looked at."""
_TUNE_HINT = "train with --fine-tune-type lora or dora"


@dataclass(frozen=True, slots=True)
class _Config:
    """What an MLX config says of the maths."""

    rank: int
    scale: float
    dora: bool
    base_model: str | None


def is_mlx(folder: Path) -> bool:
    """Whether a folder holds an adapter as MLX writes it, and not as PEFT does."""
    return (folder / MLX_WEIGHTS_NAME).is_file() and not (folder / WEIGHTS_NAME).is_file()


def convert(folder: Path, target: Path) -> None:
    """Write the MLX adapter in `folder` into the folder `target` as PEFT would have written it.

    `target` may be `folder`. One tensor is in memory at a time. Raises AdapterError with everything that keeps the
    adapter from being converted; whether it fits a model is for `inspect_adapter` to say of the result.
    """
    try:
        config, problems = _read_config(folder / CONFIG_NAME)
        with (folder / MLX_WEIGHTS_NAME).open("rb") as stream:
            entries = {} if config is None else _renamed(read_header(stream, MLX_WEIGHTS_NAME), config, problems)
            if problems:
                raise AdapterError(problems)
            assert config is not None
            target.mkdir(exist_ok=True)
            with (target / WEIGHTS_NAME).open("wb") as out:
                _write(stream, entries, out)
        (target / CONFIG_NAME).write_text(json.dumps(_peft_config(config, entries), indent=2), encoding="utf-8")
    except OSError as error:
        raise AdapterError([Problem(MLX_WEIGHTS_NAME, f"cannot be converted: {error.strerror}")]) from error


def _read_config(path: Path) -> tuple[_Config | None, list[Problem]]:
    if path.stat().st_size > MAX_CONFIG_BYTES:
        return None, [Problem(CONFIG_NAME, f"is larger than {MAX_CONFIG_BYTES} bytes")]
    try:
        config = json.loads(path.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        return None, [Problem(CONFIG_NAME, f"is not valid JSON: {shown(str(error))}")]
    if not isinstance(config, dict):
        return None, [Problem(CONFIG_NAME, "is not a JSON object")]
    kind = config.get("fine_tune_type", "lora")
    if kind not in ("lora", "dora"):
        what = f"is {said(kind)}: the file holds whole weights, or nothing that this server knows"
        return None, [Problem("fine_tune_type", what, _TUNE_HINT)]
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, dict):
        return None, [
            Problem("lora_parameters", "is not an object with rank and scale", "MLX writes it when it trains")
        ]
    return _parameters(parameters, dora=kind == "dora", model=config.get("model"))


def _parameters(parameters: Mapping[str, Any], *, dora: bool, model: Any) -> tuple[_Config | None, list[Problem]]:
    rank, scale = parameters.get("rank"), parameters.get("scale")
    alpha = parameters.get("alpha", rank)
    problems = []
    if type(rank) is not int or not 0 < rank <= MAX_RANK:
        problems.append(Problem("lora_parameters.rank", f"is {said(rank)}, not a whole number from 1"))
    for name, value in (("scale", scale), ("alpha", alpha)):
        if not _is_number(value) and not (name == "alpha" and problems):
            problems.append(Problem(f"lora_parameters.{name}", f"is {said(value)}, not a finite number"))
    if problems:
        return None, problems
    assert isinstance(rank, int)
    assert scale is not None
    assert alpha is not None
    return _Config(rank, float(scale) * float(alpha) / rank, dora, model if isinstance(model, str) else None), []


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= 1e30 and math.isfinite(value)


def _renamed(entries: tuple[TensorEntry, ...], config: _Config, problems: list[Problem]) -> dict[str, TensorEntry]:
    """The tensors by the names that PEFT gives them."""
    renamed: dict[str, TensorEntry] = {}
    for entry in entries:
        match = _NAME.fullmatch(entry.name)
        if match is None or (match[2] == "m" and not config.dora):
            problems.append(about(entry, "is neither lora_a nor lora_b of any module", _TUNE_HINT))
        elif match[1].split(".")[-1] == EMBEDDING:
            what = "is LoRA on embed_tokens, which MLX applies to a tied lm_head, too, and PEFT does not"
            problems.append(about(entry, what, "leave embed_tokens out of lora_parameters.keys"))
        elif len(entry.shape) != (wanted := 1 if match[2] == "m" else 2):
            hint = "LoRA on experts is not supported" if len(entry.shape) > wanted else "save the adapter again"
            problems.append(about(entry, f"has {len(entry.shape)} dimensions instead of {wanted}", hint))
        elif ITEM_BYTES[entry.dtype] not in _INTEGERS:
            problems.append(about(entry, f"has dtype {entry.dtype}", "save it in float32, float16 or bfloat16"))
        else:
            renamed[f"base_model.model.{match[1]}.{_PEFT_NAMES[match[2]]}"] = entry
    return renamed


def _write(stream: BinaryIO, entries: Mapping[str, TensorEntry], out: BinaryIO) -> None:
    """A safetensors file of the tensors, every matrix transposed."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, entry in sorted(entries.items()):
        offsets = [position, position + entry.nbytes]
        header[name] = {"dtype": entry.dtype, "shape": entry.shape[::-1], "data_offsets": offsets}
        position += entry.nbytes
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    out.write(len(raw).to_bytes(8, "little") + raw)
    for _, entry in sorted(entries.items()):
        out.writelines(_transposed(stream, entry))


def _transposed(stream: BinaryIO, entry: TensorEntry) -> Iterator[bytes]:
    stream.seek(entry.start)
    data = stream.read(entry.nbytes)
    if len(data) < entry.nbytes:
        raise AdapterError([about(entry, "the file became shorter while it was read")])
    numbers = np.frombuffer(data, _INTEGERS[ITEM_BYTES[entry.dtype]]).reshape(entry.shape)
    yield np.ascontiguousarray(numbers.T).tobytes()


def _peft_config(config: _Config, entries: Mapping[str, TensorEntry]) -> dict[str, Any]:
    modules = {name.removeprefix("base_model.model.").rsplit(".lora_", 1)[0] for name in entries}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.base_model,
        "r": config.rank,
        "lora_alpha": config.scale * config.rank,
        "use_dora": config.dora,
        "bias": "none",
        "target_modules": sorted({module.rsplit(".", 1)[-1] for module in modules}),
    }
