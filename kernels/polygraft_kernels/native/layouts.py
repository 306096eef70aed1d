"""The structs of abi.h, field by field, and how matrices are packed for the inner loop of tile.h."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, Structure, c_double, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from polygraft_kernels.api import LoraGroups
from polygraft_kernels.native.units import pack

Zeros = Callable[..., Tensor]
"""`zeros(shape, dtype=...)`, as torch.zeros; the inner loop may read a few bytes before what it gives."""


class Linear(Structure):
    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("scale", c_void_p),
        ("inputs", c_int64),
        ("outputs", c_int64),
    )


class LoraSlot(Structure):
    _fields_ = (("a", c_void_p), ("rank", c_int64))


class LoraSegment(Structure):
    _fields_ = (
        ("b", c_void_p),
        ("rank", c_int64),
        ("scale", c_double),
        ("gain", c_void_p),
        ("shift", c_void_p),
    )


class Bank(Structure):
    _fields_ = (
        ("slots", POINTER(LoraSlot)),
        ("segments", POINTER(LoraSegment)),
        ("widths", POINTER(c_int64)),
        ("num_segments", c_int64),
        ("inputs", c_int64),
    )


class Groups(Structure):
    _fields_ = (("slots", POINTER(c_int32)), ("starts", POINTER(c_int32)), ("count", c_int64))


class Cache(Structure):
    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("block_size", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("lanes", c_int64),
    )


class Step(Structure):
    _fields_ = (
        ("positions", c_void_p),
        ("slot_mapping", c_void_p),
        ("query_starts", c_void_p),
        ("block_tables", c_void_p),
        ("rows", c_int64),
        ("sequences", c_int64),
        ("table_width", c_int64),
        ("groups", Groups),
    )


class Heads(Structure):
    _fields_ = (("data", c_void_p), ("row", c_int64), ("head", c_int64))


class LoraLinear(Structure):
    _fields_ = (("linear", c_void_p), ("bank", c_void_p))


class Layer(Structure):
    _fields_ = (
        ("input_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("post_norm", c_void_p),
        ("qkv", LoraLinear),
        ("o", LoraLinear),
        ("gate_up", LoraLinear),
        ("down", LoraLinear),
        ("heads", c_int64),
        ("window", c_int64),
        ("eps", c_double),
    )


class SampleRows(Structure):
    _fields_ = (
        ("temperature", c_void_p),
        ("top_k", c_void_p),
        ("top_p", c_void_p),
        ("min_p", c_void_p),
        ("uniform", c_void_p),
    )


def pack_groups(groups: LoraGroups) -> Groups:
    """Copies of the two lists; ctypes keeps them alive with the struct."""
    count = len(groups.slots)
    return Groups((c_int32 * count)(*groups.slots), (c_int32 * (count + 1))(*groups.starts), count)


def heads_of(x: Tensor) -> Heads:
    """[T, heads, D] with unit stride over D."""
    return Heads(x.data_ptr(), x.stride(0), x.stride(1))


def pack_panels(matrix: Tensor, lanes: int, zeros: Zeros) -> Tensor:
    """[N, K] -> flat panels of 2 * lanes outputs, zero-padded to whole vectors, in memory from `zeros(shape, dtype)`.

    float32 and int8: [k][2][lanes]; bfloat16: [k / 2][2][lanes][2] with two consecutive k side by side, K padded to
    even.
    """
    matrix = matrix.detach().contiguous()
    outputs, inputs = matrix.shape
    together = _together(matrix.dtype)
    panels = zeros((-(-outputs // lanes) * lanes * -(-inputs // together) * together,), dtype=matrix.dtype)
    pack(matrix.data_ptr(), matrix.itemsize, outputs, inputs, lanes, together, panels.data_ptr())
    return panels


def unpack_keys(blocks: Tensor, block_size: int, head_dim: int, lanes: int) -> Tensor:
    """[n, G, block_size * D] as kv.h lays keys out -> [n * block_size, G, D]."""
    together = _together(blocks.dtype)
    count, heads, _ = blocks.shape
    split = blocks.view(count, heads, block_size // lanes, head_dim // together, lanes, together)
    return split.permute(0, 2, 4, 1, 3, 5).reshape(count * block_size, heads, head_dim)


def unpack_values(blocks: Tensor, block_size: int, head_dim: int, lanes: int) -> Tensor:
    """[n, G, block_size * D] as kv.h lays values out -> [n * block_size, G, D]."""
    together = _together(blocks.dtype)
    count, heads, _ = blocks.shape
    split = blocks.view(count, heads, head_dim // lanes, block_size // together, lanes, together)
    return split.permute(0, 3, 5, 1, 2, 4).reshape(count * block_size, heads, head_dim)


def address(struct: Structure) -> int:
    """Where the struct lies; the caller keeps it alive."""
    return ctypes.addressof(struct)


def _together(dtype: torch.dtype) -> int:
    return 2 if dtype == torch.bfloat16 else 1
