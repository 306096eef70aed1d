"""Uploads that are wrong in one way each, made from an adapter that is right."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import random
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def zip_of(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def tar_of(members: dict[str, bytes], *special: tarfile.TarInfo) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for member in special:
            archive.addfile(member)
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def safetensors(header: dict[str, Any], data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


class Maker:
    """Takes an adapter apart and puts it together again, wrong."""

    def __init__(self, folder: Path) -> None:
        self.config: dict[str, Any] = json.loads((folder / CONFIG).read_text())
        self.weights = (folder / WEIGHTS).read_bytes()
        (size,) = struct.unpack("<Q", self.weights[:8])
        self.header: dict[str, Any] = json.loads(self.weights[8 : 8 + size])
        self.data = self.weights[8 + size :]

    def archive(self, config: dict[str, Any] | None = None, weights: bytes | None = None) -> bytes:
        raw = json.dumps(self.config if config is None else config).encode()
        return zip_of({CONFIG: raw, WEIGHTS: self.weights if weights is None else weights})

    def tensors(self, change: Callable[[dict[str, Any]], None]) -> bytes:
        """The weights with a changed header over the same data."""
        header = json.loads(json.dumps(self.header))
        change(header)
        return safetensors(header, self.data)

    def first(self) -> str:
        return next(name for name in self.header if name != "__metadata__")


def uploads(folder: Path, count: int) -> Iterator[tuple[str, str, bytes]]:
    """`count` of them: what is wrong, the file's name, its bytes. The kinds take turns, never quite the same."""
    maker = Maker(folder)
    draw = random.Random(0)
    for number in range(count):
        kinds = KINDS[number % len(KINDS)]
        name, content = kinds(maker, draw)
        yield kinds.__name__, name, content


def truncated_zip(maker: Maker, draw: random.Random) -> tuple[str, bytes]:
    whole = maker.archive()
    return "a.zip", whole[: draw.randrange(1, len(whole) - 1)]


def truncated_tar(maker: Maker, draw: random.Random) -> tuple[str, bytes]:
    whole = tar_of({CONFIG: json.dumps(maker.config).encode(), WEIGHTS: maker.weights})
    return "a.tar.gz", whole[: draw.randrange(1, len(whole) // 2)]


def truncated_weights(maker: Maker, draw: random.Random) -> tuple[str, bytes]:
    return "a.zip", maker.archive(weights=maker.weights[: draw.randrange(len(maker.weights) - 1)])


def noise(_: Maker, draw: random.Random) -> tuple[str, bytes]:
    return draw.choice(["a.zip", "a.tar.gz"]), draw.randbytes(draw.randrange(20_000))


def zip_bomb(_: Maker, draw: random.Random) -> tuple[str, bytes]:
    return "a.zip", zip_of({CONFIG: b"{}", WEIGHTS: bytes(draw.randrange(60, 90) << 20)})


def gzip_bomb(_: Maker, draw: random.Random) -> tuple[str, bytes]:
    return "a.tar.gz", gzip.compress(bytes(draw.randrange(60, 90) << 20), 1)


def many_members(maker: Maker, draw: random.Random) -> tuple[str, bytes]:
    members = {f"file-{index}-{draw.random()}": b"" for index in range(20_000)}
    return "a.zip", zip_of(members)


def climbing_name(maker: Maker, draw: random.Random) -> tuple[str, bytes]:
    up = draw.choice(["../../", "/tmp/", "x/../../", "..\\..\\", "C:\\", "./../"])
    return "a.zip", zip_of({up + CONFIG: json.dumps(maker.config).encode(), up + WEIGHTS: maker.weights})


def linked(maker: Maker, draw: random.Random) -> tuple[str, bytes]:
    link = tarfile.TarInfo(WEIGHTS)
    link.type = draw.choice([tarfile.SYMTYPE, tarfile.LNKTYPE])
    link.linkname = draw.choice(["/etc/passwd", "../../pepper", CONFIG])
    return "a.tar.gz", tar_of({CONFIG: json.dumps(maker.config).encode()}, link)


def device(maker: Maker, draw: random.Random) -> tuple[str, bytes]:
    member = tarfile.TarInfo(WEIGHTS)
    member.type = draw.choice([tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE])
    return "a.tar.gz", tar_of({CONFIG: json.dumps(maker.config).encode()}, member)


def pickled(maker: Maker, draw: random.Random) -> tuple[str, bytes]:
    content = pickle.dumps({"x": draw.random()})
    return "a.zip", zip_of({CONFIG: json.dumps(maker.config).encode(), "adapter_model.bin": content})


def pickled_in_disguise(maker: Maker, draw: random.Random) -> tuple[str, bytes]:
    return "a.zip", maker.archive(weights=pickle.dumps({"x": draw.random()}))


def no_config(maker: Maker, _: random.Random) -> tuple[str, bytes]:
    return "a.zip", zip_of({WEIGHTS: maker.weights})


def broken_config(maker: Maker, draw: random.Random) -> tuple[str, bytes]:
    raw = json.dumps(maker.config)[: draw.randrange(1, 100)].encode()
    return "a.zip", zip_of({CONFIG: raw, WEIGHTS: maker.weights})


def deep_config(maker: Maker, draw: random.Random) -> tuple[str, bytes]:
    return "a.zip", zip_of({CONFIG: b"[" * draw.randrange(50_000, 90_000), WEIGHTS: maker.weights})


def impossible_field(maker: Maker, draw: random.Random) -> tuple[str, bytes]:
    field, value = draw.choice(
        [("r", 0), ("r", -1), ("r", 10**30), ("r", "8"), ("lora_alpha", float("nan")), ("lora_alpha", [1]),
         ("target_modules", 5), ("peft_type", "IA3"), ("rank_pattern", {"(": 4}), ("use_rslora", "yes")]
    )  # fmt: skip
    return "a.zip", maker.archive(config=maker.config | {field: value})


def not_a_number(maker: Maker, draw: random.Random) -> tuple[str, bytes]:
    data = bytearray(maker.data)
    width = {"F32": 4, "F16": 2, "BF16": 2}[maker.header[maker.first()]["dtype"]]
    at = draw.randrange(len(data) // width) * width
    data[at : at + width] = b"\xff" * width
    return "a.zip", maker.archive(weights=safetensors(maker.header, bytes(data)))


def wrong_shape(maker: Maker, draw: random.Random) -> tuple[str, bytes]:
    name = draw.choice([name for name in maker.header if name != "__metadata__"])

    def change(header: dict[str, Any]) -> None:
        header[name]["shape"] = header[name]["shape"][::-1]

    return "a.zip", maker.archive(weights=maker.tensors(change))


def unknown_module(maker: Maker, draw: random.Random) -> tuple[str, bytes]:
    def change(header: dict[str, Any]) -> None:
        odd = draw.choice(["مرحبا", "模型", "модель", "🦙", "a\u0000b", "x" * 5000, "ñ", "\u202e", "''; DROP TABLE"])
        header[f"base_model.model.{odd}.lora_A.weight"] = header.pop(maker.first())

    return "a.zip", maker.archive(weights=maker.tensors(change))


def overlapping(maker: Maker, draw: random.Random) -> tuple[str, bytes]:
    def change(header: dict[str, Any]) -> None:
        start, end = header[maker.first()]["data_offsets"]
        header[maker.first()]["data_offsets"] = [start + draw.choice([-2, 2, 10**15]), end]

    return "a.zip", maker.archive(weights=maker.tensors(change))


def ten_thousand_tensors(maker: Maker, draw: random.Random) -> tuple[str, bytes]:
    header = {
        f"base_model.model.model.layers.{index}.self_attn.q_proj.lora_A.weight": {
            "dtype": "F32", "shape": [1, 1], "data_offsets": [4 * index, 4 * index + 4]
        }
        for index in range(10_000)
    }  # fmt: skip
    return "a.zip", maker.archive(weights=safetensors(header, draw.randbytes(40_000)))


def lying_header(maker: Maker, draw: random.Random) -> tuple[str, bytes]:
    size = draw.choice([0, 1, 2**32, 2**63, 2**64 - 1])
    return "a.zip", maker.archive(weights=struct.pack("<Q", size) + maker.weights[8:])


def empty(_: Maker, draw: random.Random) -> tuple[str, bytes]:
    return draw.choice(["a.zip", "a.tar.gz"]), b""


KINDS = [
    truncated_zip, truncated_tar, truncated_weights, noise, zip_bomb, gzip_bomb, many_members, climbing_name, linked,
    device, pickled, pickled_in_disguise, no_config, broken_config, deep_config, impossible_field, not_a_number,
    wrong_shape, unknown_module, overlapping, ten_thousand_tensors, lying_header, empty,
]  # fmt: skip
