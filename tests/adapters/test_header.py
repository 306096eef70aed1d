"""The header reader: what safetensors writes is read, and anything else is refused as an AdapterError."""

from __future__ import annotations

import io
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from polygraft_adapters import AdapterError
from polygraft_adapters.header import MAX_HEADER_BYTES, TensorEntry, read_header

NAME = "adapter_model.safetensors"


def read(data: bytes) -> tuple[TensorEntry, ...]:
    return read_header(io.BytesIO(data), NAME)


def pack(header: Any, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def f32(start: int, end: int, **changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [(end - start) // 4], "data_offsets": [start, end], **changes}


def test_reads_what_safetensors_writes(tmp_path: Path) -> None:
    tensors = {
        "b": torch.arange(6, dtype=torch.float32).view(2, 3),
        "a": torch.ones(3, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 4, dtype=torch.float16),
        "scalar": torch.tensor(7, dtype=torch.int64),
    }
    save_file(tensors, tmp_path / NAME, metadata={"format": "pt"})
    data = (tmp_path / NAME).read_bytes()
    with (tmp_path / NAME).open("rb") as stream:
        entries = read_header(stream, NAME)
    assert [(entry.name, entry.dtype, entry.shape) for entry in entries] == [
        ("a", "BF16", (3,)),
        ("b", "F32", (2, 3)),
        ("empty", "F16", (0, 4)),
        ("scalar", "I64", ()),
    ]
    assert data[entries[1].start : entries[1].end] == struct.pack("<6f", *range(6))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "too few"),
        (b"1234567", "too few"),
        (pack(b"{}")[:-1], "truncated"),
        (struct.pack("<Q", 2**63) + b"{}", "claims 9223372036854775808 bytes"),
        (struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}", "claims"),
        (pack(b""), "not valid JSON"),
        (pack(b"{"), "not valid JSON"),
        (pack(b'{"a":"\xff"}'), "not valid JSON"),
        (pack(b"[" * 100_000), "not valid JSON"),
        (pack(b'{"a":' + b"9" * 5000 + b"}"), "not valid JSON"),
        (pack([]), "not a JSON object"),
        (pack({"__metadata__": {"format": 1}}), "__metadata__"),
        (pack({"__metadata__": None}), "__metadata__"),
        (pack(b'{"a":1,"a":2}'), "twice"),
        (pack({"a": 5}), "not described"),
        (pack({"a": {"dtype": "F32", "shape": [1]}}, b"1234"), "not described"),
        (pack({"a": {**f32(0, 4), "extra": 1}}, b"1234"), "not described"),
        (pack({"a": f32(0, 4, dtype="F4")}, b"1234"), 'unknown dtype "F4"'),
        (pack({"a": f32(0, 4, dtype=[])}, b"1234"), "unknown dtype"),
        (pack({"a": f32(0, 4, shape=[True])}, b"1234"), "whole numbers"),
        (pack({"a": f32(0, 4, shape=[-1])}, b"1234"), "whole numbers"),
        (pack({"a": f32(0, 4, shape=1)}, b"1234"), "whole numbers"),
        (pack({"a": f32(0, 4, shape=[1.0])}, b"1234"), "whole numbers"),
        (pack({"a": f32(0, 4, shape=[1] * 9)}, b"1234"), "whole numbers"),
        (pack({"a": f32(0, 4, data_offsets=[0, 2**64])}, b"1234"), "whole numbers"),
        (pack({"a": f32(0, 4, data_offsets=[0])}, b"1234"), "whole numbers"),
        (pack({"a": f32(0, 4, data_offsets=[4, 0])}, b"1234"), "not what its dtype and shape need"),
        (pack({"a": f32(0, 4, shape=[2])}, b"1234"), "not what its dtype and shape need"),
        (pack({"a": f32(4, 8)}, b"12345678"), "leaves a gap"),
        (pack({"a": f32(0, 4), "b": f32(8, 12)}, b"1" * 12), "leaves a gap"),
        (pack({"a": f32(0, 8), "b": f32(4, 12)}, b"1" * 12), "overlaps"),
        (pack({"a": f32(0, 4), "b": f32(0, 4)}, b"1234"), "overlaps"),
        (pack({"a": f32(0, 8)}, b"1234"), "truncated"),
        (pack({"a": f32(0, 4)}, b"12345"), "1 bytes follow"),
        (pack({}, b"1"), "1 bytes follow"),
    ],
)
def test_refuses_what_the_format_does_not_allow(data: bytes, words: str) -> None:
    with pytest.raises(AdapterError) as caught:
        read(data)
    assert words in str(caught.value)
    assert [problem.where for problem in caught.value.problems] == [NAME]


def test_more_tensors_than_any_adapter_has_are_not_looked_at() -> None:
    with pytest.raises(AdapterError, match="40001 tensors"):
        read(pack({str(number): f32(0, 0) for number in range(40_001)}))


def test_hostile_names_stay_on_one_short_line() -> None:
    with pytest.raises(AdapterError) as caught:
        read(pack({"\x1b[31mred\n" + "x" * 10_000: f32(4, 8)}, b"12345678"))
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 500


@given(st.binary(max_size=200))
@settings(deadline=None)
def test_any_bytes_either_parse_or_are_refused(data: bytes) -> None:
    try_to_read(data)


VALID = save({"layers.0.lora_A.weight": torch.ones(2, 3), "b": torch.ones(4, dtype=torch.float16)})


@given(st.lists(st.tuples(st.integers(0, len(VALID) - 1), st.integers(0, 255)), max_size=6), st.integers(0, len(VALID)))
@settings(deadline=None, max_examples=100)
def test_a_damaged_file_either_parses_or_is_refused(changes: list[tuple[int, int]], length: int) -> None:
    data = bytearray(VALID)
    for position, value in changes:
        data[position] = value
    try_to_read(bytes(data[:length]))
    try_to_read(bytes(data))


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["F32", "dtype", "shape", "data_offsets"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "__metadata__", "a"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(json_values, st.binary(max_size=16))
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_json_header_either_parses_or_is_refused(header: Any, data: bytes) -> None:
    try_to_read(pack(header, data))


def try_to_read(data: bytes) -> None:
    """Entries must lie within the file and tile it; nothing but AdapterError may be raised."""
    try:
        entries = read(data)
    except AdapterError:
        return
    spans = sorted((entry.start, entry.end) for entry in entries)
    assert [start for start, _ in spans[1:]] == [end for _, end in spans[:-1]]
    assert all(end == len(data) for _, end in spans[-1:])
