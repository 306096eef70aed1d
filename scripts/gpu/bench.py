"""What every section measures with: a layer's sizes, a clock, ceilings, figures."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from polygraft_engine.graphs import DeviceCapture
from polygraft_kernels.api import LoraBank, LoraPair, PackedLinear
from polygraft_kernels.triton import TritonBackend


@dataclass(frozen=True, slots=True)
class Sizes:
    """A layer to measure, and how much of it."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    context: int
    chunk: int
    batches: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def projections(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Input features and segments."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "qkv": (self.hidden, (q, kv, kv)),
            "o": (q, (self.hidden,)),
            "gate_up": (self.hidden, (self.intermediate, self.intermediate)),
            "down": (self.intermediate, (self.hidden,)),
        }


LAYER_OF_8B = Sizes(4096, 32, 8, 128, 14336, 2048, 512, (1, 2, 4, 8, 16, 32, 64), (8, 16, 32, 64, 128))
TINY = Sizes(64, 4, 2, 16, 96, 32, 20, (1, 5), (8,))


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the report. `floor_us`: the time that bytes or FLOP need at the measured ceilings. `against`: another
    figure in microseconds, or tokens a second, to compare with.
    """

    section: str
    name: str
    batch: int
    detail: str
    value: float
    unit: str
    floor: float | None = None
    against: float | None = None


class Clock:
    """Seconds of a call: the median of a captured graph's replays with a cold cache; in the interpreter, of one."""

    def __init__(self, smoke: bool) -> None:
        self._capture = None if smoke else DeviceCapture()

    def __call__(self, call: Callable[[], object]) -> float:
        if self._capture is None:
            began = time.perf_counter()
            call()
            return time.perf_counter() - began
        nothing = torch.empty(0, device="cuda")

        def compute() -> Tensor:
            call()
            return nothing

        return float(triton.testing.do_bench(self._capture(compute), return_mode="median")) * 1e-3


@dataclass(frozen=True, slots=True)
class Bench:
    """What every section measures with."""

    backend: TritonBackend
    sizes: Sizes
    clock: Clock
    bytes_per_second: float
    flops_per_second: float

    def figure(
        self, name: str, batch: int, detail: str, call: Callable[[], object], flops: float, size: float
    ) -> Figure:
        """Microseconds of `call`, beside its floor."""
        floor = max(flops / self.flops_per_second, size / self.bytes_per_second)
        return Figure("operations", name, batch, detail, self.clock(call) * 1e6, "us", floor * 1e6)

    def random(self, *shape: int) -> Tensor:
        return (torch.randn(*shape, device=self.backend.device) * 0.05).bfloat16()

    def linears(self) -> dict[str, PackedLinear]:
        """The layer's weights."""
        return {n: self.backend.pack_linear(self.random(sum(s), k)) for n, (k, s) in self.sizes.projections.items()}

    def banks(self, slots: int, rank: int) -> dict[str, LoraBank]:
        """The layer's adapters, all of one rank."""
        banks: dict[str, LoraBank] = {}
        for name, (inputs, segments) in self.sizes.projections.items():
            banks[name] = self.backend.lora_bank(inputs, segments, slots, torch.bfloat16)
            for slot in range(slots):
                pairs = [LoraPair(self.random(rank, inputs), self.random(n, rank), 1.0) for n in segments]
                banks[name].load(slot, pairs)
        return banks


def ceilings(clock: Clock, smoke: bool) -> tuple[float, float]:
    """Bytes a second of a copy, FLOP a second of a large bfloat16 product."""
    device, side = ("cpu", 64) if smoke else ("cuda", 8192)
    source = torch.zeros(1 << (16 if smoke else 30), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a = torch.ones(side, side, dtype=torch.bfloat16, device=device)
    return 2 * source.numel() / clock(lambda: target.copy_(source)), 2 * side**3 / clock(lambda: a @ a)
