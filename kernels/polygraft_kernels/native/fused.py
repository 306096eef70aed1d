"""Steps, layers and caches as the structs that the fused call reads; what it would otherwise trust is checked here."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from polygraft_kernels.api import DecoderLayer, KVCache, LoraLinear, StepTensors
from polygraft_kernels.checks import check_starts, check_vector, require
from polygraft_kernels.native import layouts
from polygraft_kernels.native.layouts import Layer, Step, pack_groups
from polygraft_kernels.native.storage import FusedLayer, NativeBank, NativeCache, NativeLinear


def describe_step(step: StepTensors) -> Step:
    """The struct for `step`, whose tensors it points at."""
    rows = step.positions.shape[0]
    check_starts(step.groups, rows)
    check_vector(step.positions, "positions", torch.int64)
    check_vector(step.slot_mapping, "slot_mapping", torch.int64, rows)
    check_vector(step.query_starts, "query_starts", torch.int32)
    check_vector(step.block_tables, "block_tables", torch.int32, step.query_starts.shape[0] - 1)
    return Step(
        step.positions.data_ptr(),
        step.slot_mapping.data_ptr(),
        step.query_starts.data_ptr(),
        step.block_tables.data_ptr(),
        rows,
        step.query_starts.shape[0] - 1,
        step.block_tables.shape[1],
        pack_groups(step.groups),
    )


def describe_layer(layer: DecoderLayer, x: Tensor) -> FusedLayer:
    """What the fused call knows of `layer`, made once for each dtype of activations x [T, K]."""
    first = layer.qkv.weight
    assert isinstance(first, NativeLinear)
    if first.fused is None or first.fused.layer is not layer or first.fused.dtype != x.dtype:
        first.fused = _describe(layer, x.dtype)
    require(first.dtype in (None, x.dtype), f"activations are {x.dtype}, what they meet is {first.dtype}")
    require(x.shape[1] == first.in_features, f"x is {list(x.shape)}, a layer takes {first.in_features} features")
    return first.fused


def cache_address(cache: KVCache, layer: DecoderLayer, dtype: torch.dtype) -> int:
    """Where the struct of a cache that fits `layer` lies."""
    assert isinstance(cache, NativeCache)
    require(cache.dtype == dtype, f"activations are {dtype}, what they meet is {cache.dtype}")
    require(cache.head_dim == layer.head_dim and cache.kv_heads == layer.kv_heads, "the cache has other heads")
    return cache.address


def _describe(layer: DecoderLayer, dtype: torch.dtype) -> FusedLayer:
    """What the fused call would otherwise trust is checked here, once per layer."""
    for weight in (layer.input_norm, layer.post_norm, layer.q_norm, layer.k_norm):
        fits = weight is None or (weight.dtype == dtype and weight.is_contiguous())
        require(fits, f"norm weights must be contiguous and {dtype}")
    q_norm = None if layer.q_norm is None else layer.q_norm.data_ptr()
    k_norm = None if layer.k_norm is None else layer.k_norm.data_ptr()
    norms = (layer.input_norm.data_ptr(), q_norm, k_norm, layer.post_norm.data_ptr())
    linears = (layer.qkv, layer.o, layer.gate_up, layer.down)
    structs = [_describe_linear(each, dtype) for each in linears]
    num_slots = min((each.bank.num_slots for each in linears if each.bank is not None), default=sys.maxsize)
    return FusedLayer(
        layer, dtype, Layer(*norms, *structs, layer.heads, checked_window(layer.window), layer.eps), num_slots
    )


def _describe_linear(layer: LoraLinear, dtype: torch.dtype) -> layouts.LoraLinear:
    weight, bank = layer.weight, layer.bank
    assert isinstance(weight, NativeLinear)
    require(weight.dtype in (None, dtype), f"activations are {dtype}, a weight is {weight.dtype}")
    if bank is None:
        return layouts.LoraLinear(weight.address, None)
    assert isinstance(bank, NativeBank)
    require(bank.dtype == dtype, f"activations are {dtype}, an adapter bank is {bank.dtype}")
    fits = bank.in_features == weight.in_features and sum(bank.segments) == weight.out_features
    require(fits, "an adapter bank does not fit its weight")
    return layouts.LoraLinear(weight.address, bank.address)


def checked_window(window: int | None) -> int:
    """As the library wants it: 0 for none."""
    require(window is None or window > 0, f"a window of {window} keys sees nothing")
    return 0 if window is None else window
