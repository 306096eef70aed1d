"""The operations of `api.Backend` as calls into the library: check, take addresses, call."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref, c_void_p
from dataclasses import fields
from typing import ClassVar

import torch
from torch import Tensor

from polygraft_kernels.api import (
    Backend,
    DecoderLayer,
    KVCache,
    LoraBank,
    LoraGroups,
    PackedLinear,
    SampleTensors,
    StepTensors,
)
from polygraft_kernels.checks import (
    check_groups,
    check_heads,
    check_int8,
    check_rows,
    check_sampling,
    check_table,
    check_vector,
    check_weight,
    require,
)
from polygraft_kernels.native.fused import cache_address, checked_window, describe_layer, describe_step
from polygraft_kernels.native.layouts import SampleRows, Step, address, heads_of, pack_groups
from polygraft_kernels.native.pages import Arena, Pages
from polygraft_kernels.native.storage import NativeBank, NativeCache, NativeLinear
from polygraft_kernels.native.units import DTYPES, Functions, Unit
from polygraft_kernels.quantization import Int8Weight


class NativeBackend(Backend):
    """C++ on the processor, in float32 or bfloat16, on as many threads as torch uses.

    Results of a row do not depend on the other rows, the number of threads or how a sequence was chunked, bit for bit.
    """

    name: ClassVar[str] = "native"

    def __init__(self, unit: Unit) -> None:
        self.device = torch.device("cpu")
        self.dtypes = frozenset(DTYPES)
        self.unit = unit
        self.isa = unit.isa
        self._pages = Pages()
        self._arena = Arena()
        self._last_step: tuple[StepTensors, Step] | None = None

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> NativeLinear:
        check_weight(weight, bias)
        self._functions(weight)
        return NativeLinear(weight, None, bias, weight.dtype, self.unit.lanes, self._arena)

    def pack_int8(self, weight: Int8Weight, bias: Tensor | None = None) -> NativeLinear:
        check_int8(weight, bias)
        return NativeLinear(weight.q, weight.scale, bias, None, self.unit.lanes, self._arena)

    def linear(self, x: Tensor, weight: PackedLinear) -> Tensor:
        return self._multiply(x, weight, x.dtype)

    def logits(self, x: Tensor, weight: PackedLinear) -> Tensor:
        return self._multiply(x, weight, torch.float32)

    def _multiply(self, x: Tensor, weight: PackedLinear, result: torch.dtype) -> Tensor:
        assert isinstance(weight, NativeLinear)
        functions = self._functions(x, weight.dtype)
        check_rows(x, "x", weight.in_features)
        rows = x.shape[0]
        y = torch.empty((rows, weight.out_features), dtype=result)
        function = functions.linear if result == x.dtype else functions.logits
        if rows > 0:
            function(weight.address, x.data_ptr(), x.stride(0), rows, y.data_ptr(), torch.get_num_threads())
        return y

    def lora_bank(self, in_features: int, segments: Sequence[int], num_slots: int, dtype: torch.dtype) -> NativeBank:
        return NativeBank(in_features, segments, num_slots, _supported(dtype), self.unit.lanes, self._arena)

    def lora(self, y: Tensor, x: Tensor, bank: LoraBank, groups: LoraGroups) -> None:
        assert isinstance(bank, NativeBank)
        functions = self._functions(x, bank.dtype)
        require(y.dtype == x.dtype, f"y is {y.dtype}, x {x.dtype}")
        check_rows(x, "x", bank.in_features)
        check_rows(y, "y", sum(bank.segments))
        check_groups(groups, bank, x.shape[0])
        packed = pack_groups(groups)
        functions.lora(
            bank.address,
            address(packed),
            x.data_ptr(),
            x.stride(0),
            y.data_ptr(),
            y.stride(0),
            torch.get_num_threads(),
        )

    def kv_cache(
        self, num_blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> NativeCache:
        return NativeCache(num_blocks, block_size, kv_heads, head_dim, _supported(dtype), self.unit.lanes, self._pages)

    def store_kv(self, k: Tensor, v: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
        assert isinstance(cache, NativeCache)
        functions = self._functions(k, cache.dtype)
        require(v.dtype == k.dtype, f"v is {v.dtype}, k {k.dtype}")
        check_heads(k, "k", cache.kv_heads, cache.head_dim)
        check_heads(v, "v", cache.kv_heads, cache.head_dim)
        check_vector(slot_mapping, "slot_mapping", torch.int64)
        rows = k.shape[0]
        require(v.shape[0] == rows == slot_mapping.shape[0], "k, v and slot_mapping differ in rows")
        functions.store_kv(cache.address, byref(heads_of(k)), byref(heads_of(v)), slot_mapping.data_ptr(), rows)

    def attention(self, q: Tensor, cache: KVCache, step: StepTensors, window: int | None) -> Tensor:
        assert isinstance(cache, NativeCache)
        functions = self._functions(q, cache.dtype)
        heads = q.shape[1]
        check_heads(q, "q", heads, cache.head_dim)
        require(heads % cache.kv_heads == 0, f"{heads} query heads do not share {cache.kv_heads} key heads evenly")
        require(q.shape[0] == step.positions.shape[0], "q and positions differ in rows")
        out = torch.empty(q.shape, dtype=q.dtype)
        functions.attention(
            cache.address,
            address(self._step(step)),
            byref(heads_of(q)),
            heads,
            checked_window(window),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        functions = self._functions(x, weight.dtype)
        width = x.shape[-1]
        require(weight.is_contiguous() and tuple(weight.shape) == (width,), f"the weight is not a contiguous [{width}]")
        rows = x if x.dim() == 3 and x.stride(2) == 1 else x.contiguous().view(-1, 1, width)
        out = torch.empty(x.shape, dtype=x.dtype)
        functions.rms_norm(
            byref(heads_of(rows)),
            weight.data_ptr(),
            rows.shape[0],
            rows.shape[1],
            width,
            eps,
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out

    def rope(self, q: Tensor, k: Tensor, positions: Tensor, table: Tensor) -> None:
        functions = self._functions(q, k.dtype)
        dim = q.shape[2]
        check_heads(q, "q", q.shape[1], dim)
        check_heads(k, "k", k.shape[1], dim)
        check_table(table, dim)
        check_vector(positions, "positions", torch.int64)
        require(q.shape[0] == k.shape[0] == positions.shape[0], "q, k and positions differ in rows")
        functions.rope(
            byref(heads_of(q)),
            q.shape[1],
            byref(heads_of(k)),
            k.shape[1],
            positions.data_ptr(),
            q.shape[0],
            table.data_ptr(),
            dim,
        )

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        functions = self._functions(gate_up)
        require(gate_up.shape[-1] % 2 == 0, f"gate_up {list(gate_up.shape)} is not [T, 2 I]")
        check_rows(gate_up, "gate_up", gate_up.shape[-1])
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((rows, width), dtype=gate_up.dtype)
        functions.silu_mul(gate_up.data_ptr(), gate_up.stride(0), rows, width, out.data_ptr(), torch.get_num_threads())
        return out

    def sample(self, logits: Tensor, how: SampleTensors) -> Tensor:
        check_sampling(logits, how)
        logits = logits.contiguous()
        rows, vocab = logits.shape
        tokens = torch.empty(rows, dtype=torch.int64)
        numbers = SampleRows(*(getattr(how, field.name).data_ptr() for field in fields(how)))
        self.unit.sample(address(numbers), logits.data_ptr(), rows, vocab, tokens.data_ptr(), torch.get_num_threads())
        return tokens

    def decoder_layer(
        self, x: Tensor, layer: DecoderLayer, cache: KVCache, step: StepTensors, rope_table: Tensor
    ) -> Tensor:
        """One call for the whole layer, the same bits as the single operations. Overwrites and returns x."""
        return self.decoder(x, (layer,), (cache,), step, rope_table)

    def decoder(
        self,
        x: Tensor,
        layers: Sequence[DecoderLayer],
        caches: Sequence[KVCache],
        step: StepTensors,
        rope_table: Tensor,
    ) -> Tensor:
        """One call, and one parallel region, for all layers; the same bits. Overwrites and returns x."""
        x = x.contiguous()
        if x.shape[0] == 0 or not layers:
            return x
        functions = self._functions(x)
        require(x.dim() == 2 and x.shape[0] == step.positions.shape[0], f"x is {list(x.shape)}")
        fused = [describe_layer(layer, x) for layer in layers]
        known = max(step.groups.slots, default=-1) < min(each.num_slots for each in fused)
        require(known, f"the layers' banks do not all have the slots {step.groups.slots}")
        addresses = [cache_address(cache, layer, x.dtype) for cache, layer in zip(caches, layers, strict=True)]
        heads = {(layer.heads, layer.head_dim) for layer in layers}
        blocks = {cache.block_size for cache in caches}
        require(len(heads) == 1 and len(blocks) == 1, f"layers of heads {heads} in blocks of {blocks} are not alike")
        check_table(rope_table, layers[0].head_dim)
        functions.decoder(
            (c_void_p * len(fused))(*(address(each.struct) for each in fused)),
            (c_void_p * len(fused))(*addresses),
            len(fused),
            address(self._step(step)),
            rope_table.data_ptr(),
            x.data_ptr(),
            torch.get_num_threads(),
        )
        return x

    def _functions(self, x: Tensor, stored: torch.dtype | None = None) -> Functions:
        """Those for x's dtype, which must be that of what was stored before."""
        functions = self.unit.functions.get(x.dtype)
        require(
            functions is not None and x.device.type == "cpu",
            f"the native backend computes in float32 or bfloat16 on the processor, not in {x.dtype} on {x.device}",
        )
        require(stored is None or stored == x.dtype, f"activations are {x.dtype}, what they meet is {stored}")
        assert functions is not None
        return functions

    def _step(self, step: StepTensors) -> Step:
        """The struct for `step`; every layer of a step asks for the same one."""
        last = self._last_step
        if last is None or last[0] is not step:
            last = (step, describe_step(step))
            self._last_step = last
        return last[1]


def _supported(dtype: torch.dtype) -> torch.dtype:
    require(dtype in DTYPES, f"the native backend stores float32 or bfloat16, not {dtype}")
    return dtype
