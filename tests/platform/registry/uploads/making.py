"""Adapters, archives and forms, right and wrong, made without any library that would refuse to."""

import asyncio
import io
import json
import struct
import tarfile
import zipfile
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import httpx

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TENSOR = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
PATH = "/v1/adapters"
Send = Callable[..., Awaitable[httpx.Response]]


def config_of(**fields: Any) -> bytes:
    """An adapter_config.json of rank 2."""
    return json.dumps(
        {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": "base"} | fields
    ).encode()


def safetensors_of(shapes: dict[str, Any], value: float) -> bytes:
    """A file of float32 tensors, every number being `value`."""
    header, position = {}, 0
    for name, (rows, columns) in shapes.items():
        end = position + 4 * rows * columns
        header[name] = {"dtype": "F32", "shape": [rows, columns], "data_offsets": [position, end]}
        position = end
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + struct.pack("<f", value) * (position // 4)


def weights_of(value: float = 0.5, rank: int = 2, **tensors: Any) -> bytes:
    """LoRA on q_proj of the only layer; `tensors` are added, as name=shape."""
    return safetensors_of({TENSOR.format("A"): (rank, 4), TENSOR.format("B"): (4, rank)} | tensors, value)


def mlx_files() -> dict[str, bytes]:
    """The same adapter as mlx-lm writes it, with a scale of 20."""
    config = {"fine_tune_type": "lora", "num_layers": 1, "lora_parameters": {"rank": 2, "scale": 20.0, "dropout": 0.0}}
    prefix = "model.layers.0.self_attn.q_proj"
    weights = safetensors_of({f"{prefix}.lora_a": (4, 2), f"{prefix}.lora_b": (2, 4)}, 0.5)
    return {CONFIG: json.dumps(config).encode(), "adapters.safetensors": weights}


def files(**changed: bytes) -> dict[str, bytes]:
    """The two files of an adapter."""
    return {CONFIG: config_of(), WEIGHTS: weights_of()} | changed


def zip_of(members: dict[str, bytes] | Iterable[tuple[zipfile.ZipInfo | str, bytes]], method: int = 8) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, content in members.items() if isinstance(members, dict) else members:
            archive.writestr(name, content)
    return buffer.getvalue()


def tar_of(members: dict[str, bytes] | Iterable[tuple[tarfile.TarInfo, bytes]], **options: Any) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", **options) as archive:
        for name, content in members.items() if isinstance(members, dict) else members:
            info = tarfile.TarInfo(name) if isinstance(name, str) else name
            if info.isreg():
                info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def form_of(*parts: tuple[str, str | None, bytes], boundary: str = "frontier") -> tuple[bytes, dict[str, str]]:
    """A body of (name, filename, content) in this order, and its headers."""
    body = b""
    for name, filename, content in parts:
        named = f'; filename="{filename}"' if filename is not None else ""
        body += (
            f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"{named}\r\n\r\n'.encode() + content + b"\r\n"
        )
    return body + f"--{boundary}--\r\n".encode(), {"Content-Type": f"multipart/form-data; boundary={boundary}"}


async def eventually(holds: Callable[[], Awaitable[bool]]) -> None:
    """Look again until it does, for twenty seconds."""
    async with asyncio.timeout(20):
        while not await holds():  # noqa: ASYNC110  # what is waited for happens elsewhere
            await asyncio.sleep(0.01)
