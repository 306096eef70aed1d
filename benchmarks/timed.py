"""A native backend that runs a step one operation at a time, and keeps for each what it took, multiplied and read."""

from __future__ import annotations

import operator
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from granular import GranularBackend, Making
from torch import Tensor

from polygraft_kernels.api import KVCache, LoraBank, LoraGroups, PackedLinear, StepTensors
from polygraft_kernels.native.storage import NativeBank, NativeLinear

T = TypeVar("T")


@dataclass(slots=True)
class Spent:
    """Sums over all calls of one operation."""

    calls: int = 0
    seconds: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0


class TimedBackend(GranularBackend):
    """`spent` by operation, since it was last emptied. What an operation reads is what it must read from memory:
    weights, keys and values; activations stay in the caches.
    """

    def __init__(self) -> None:
        super().__init__("operation")
        self.spent: dict[str, Spent] = {}

    def linear(self, x: Tensor, weight: PackedLinear) -> Tensor:
        assert isinstance(weight, NativeLinear)
        base, numbers = super(), weight.out_features * weight.in_features
        name = f"linear {weight.out_features}x{weight.in_features}"
        return self._time(name, 2.0 * len(x) * numbers, weight.nbytes, lambda: base.linear(x, weight))

    def logits(self, x: Tensor, weight: PackedLinear) -> Tensor:
        assert isinstance(weight, NativeLinear)
        base, numbers = super(), weight.out_features * weight.in_features
        return self._time("head", 2.0 * len(x) * numbers, weight.nbytes, lambda: base.logits(x, weight))

    def lora(self, y: Tensor, x: Tensor, bank: LoraBank, groups: LoraGroups) -> None:
        assert isinstance(bank, NativeBank)
        numbers = [bank.numbers(slot) for slot in groups.slots]
        rows = [end - start for start, end in pairwise(groups.starts)]
        flops = 2.0 * sum(map(operator.mul, numbers, rows))
        base = super()
        self._time("lora", flops, sum(numbers) * x.itemsize, lambda: base.lora(y, x, bank, groups))

    def attention(self, q: Tensor, cache: KVCache, step: StepTensors, window: int | None) -> Tensor:
        base = super()
        most = sys.maxsize if window is None else window
        seen = sum(min(int(position) + 1, most) for position in step.positions)
        read = sum(min(int(context), most) for context in step.context_lens)
        size = 2.0 * read * cache.kv_heads * cache.head_dim * q.itemsize
        flops = 4.0 * seen * q.shape[1] * q.shape[2]
        return self._time("attention", flops, size, lambda: base.attention(q, cache, step, window))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        base = super()
        return self._time("rms_norm", 4.0 * x.numel(), 0, lambda: base.rms_norm(x, weight, eps))

    def rope(self, q: Tensor, k: Tensor, positions: Tensor, table: Tensor) -> None:
        base = super()
        self._time("rope", 3.0 * (q.numel() + k.numel()), 0, lambda: base.rope(q, k, positions, table))

    def store_kv(self, k: Tensor, v: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
        base = super()
        self._time("store_kv", 0, 0, lambda: base.store_kv(k, v, cache, slot_mapping))

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        base = super()
        return self._time("silu_mul", 10.0 * gate_up.numel(), 0, lambda: base.silu_mul(gate_up))

    def _time(self, name: str, flops: float, size: float, run: Callable[[], T]) -> T:
        spent = self.spent.setdefault(name, Spent())
        start = time.perf_counter()
        result = run()
        spent.seconds += time.perf_counter() - start
        spent.calls += 1
        spent.flops += flops
        spent.bytes += size
        return result


create = Making(TimedBackend)
"""For the registry of backends."""
