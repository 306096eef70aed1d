"""The header of a safetensors file, read without torch and without trusting a byte of it.

Format (the safetensors README): eight bytes of little-endian header length N, N bytes of JSON
`{name: {"dtype", "shape", "data_offsets": [start, end]}, "__metadata__": {str: str}}`, then the data, which the
tensors must tile from its first byte to the end of the file.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, BinaryIO

from polygraft_adapters.types import AdapterError, Problem
from polygraft_adapters.wording import said, shown

MAX_HEADER_BYTES = 16 * 1024 * 1024
"""Ten times what an adapter on every module of a thousand layers needs; the format itself allows 100 MB."""
MAX_TENSORS = 40_000
"""A thousand layers of seven modules with A, B, a bias and a magnitude each are 28,000."""

ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}
"""Bytes per element of every dtype that this reader can size."""

_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies: bytes start:end of the whole file, row-major."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


class _Lie(Exception):
    """A header that cannot be believed; becomes a Problem."""


def read_header(stream: BinaryIO, file_name: str) -> tuple[TensorEntry, ...]:
    """The tensors of a safetensors file, sorted by name.

    `stream` is seekable and is left at an unspecified position; `file_name` is what problems call the file. Raises
    AdapterError for anything the format does not allow, whatever the bytes are.
    """
    try:
        raw, data_start, size = _header_bytes(stream)
        entries = [_entry(name, spec, data_start) for name, spec in _tensor_specs(raw)]
        _check_tiling(entries, data_start, size)
    except _Lie as lie:
        raise AdapterError([Problem(file_name, str(lie), "save or upload the adapter again")]) from lie
    return tuple(sorted(entries, key=lambda entry: entry.name))


def _header_bytes(stream: BinaryIO) -> tuple[bytes, int, int]:
    size = stream.seek(0, 2)
    stream.seek(0)
    prefix = stream.read(_LENGTH_BYTES)
    if len(prefix) < _LENGTH_BYTES:
        raise _Lie(f"not a safetensors file: {size} bytes are too few for one")
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise _Lie(f"not a safetensors file, or a damaged one: its header claims {length} bytes")
    if length > size - _LENGTH_BYTES:
        raise _Lie(f"truncated: the header has {length} bytes and the file ends after {size - _LENGTH_BYTES} of them")
    raw = stream.read(length)
    if len(raw) < length:
        raise _Lie("truncated: the file became shorter while it was read")
    return raw, _LENGTH_BYTES + length, size


def _tensor_specs(raw: bytes) -> list[tuple[str, Any]]:
    try:
        text = raw.decode("utf-8")
        header = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise _Lie(f"the header is not valid JSON: {shown(str(error))}") from error
    if not isinstance(header, dict):
        raise _Lie("the header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _Lie("the header's __metadata__ is not an object of strings")
    if len(header) > MAX_TENSORS:
        raise _Lie(f"{len(header)} tensors are more than any adapter has; at most {MAX_TENSORS} are looked at")
    return list(header.items())


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = dict(pairs)
    if len(keys) != len(pairs):
        raise _Lie("the header names a key twice")
    return keys


def _entry(name: str, spec: Any, data_start: int) -> TensorEntry:
    where = f"tensor {shown(name)!r}"
    if not isinstance(spec, dict) or spec.keys() != {"dtype", "shape", "data_offsets"}:
        raise _Lie(f"{where} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = spec["dtype"], spec["shape"], spec["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise _Lie(f"{where} has the unknown dtype {said(dtype)}")
    if not _is_sizes(shape) or not _is_sizes(offsets) or len(offsets) != 2:
        raise _Lie(f"{where} has a shape or data_offsets that are not whole numbers")
    start, end = offsets
    if math.prod(shape) * ITEM_BYTES[dtype] != end - start:
        raise _Lie(f"{where} has {end - start} bytes, which is not what its dtype and shape need")
    return TensorEntry(name, dtype, tuple(shape), data_start + start, data_start + end)


def _is_sizes(value: Any) -> bool:
    if not isinstance(value, list) or len(value) > 8:
        return False
    # The bound keeps the products of hostile shapes, and the time they take, small.
    return all(type(item) is int and 0 <= item < 2**63 for item in value)


def _check_tiling(entries: list[TensorEntry], data_start: int, size: int) -> None:
    position = data_start
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.end)):
        if entry.start != position:
            kind = "overlaps the one before" if entry.start < position else "leaves a gap before it"
            raise _Lie(f"tensor {shown(entry.name)!r} {kind}")
        position = entry.end
    if position > size:
        raise _Lie(f"truncated: the tensors need {position} bytes and the file has {size}")
    if position < size:
        raise _Lie(f"{size - position} bytes follow the last tensor")
