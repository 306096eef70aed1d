"""How close the kernels come to the machine: `python benchmarks/kernels.py [--isa avx2] [--threads 2] [--json]`.

Every figure stands beside a ceiling measured in the same run: multiply-adds from registers, reading memory. The shapes
are SmolLM2-135M's. Each call meets weights that the caches have forgotten, as in a model of many layers.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from polygraft_kernels.api import (
    DecoderLayer,
    LoraBank,
    LoraGroups,
    LoraLinear,
    LoraPair,
    StepTensors,
)
from polygraft_kernels.native import NativeBackend, create_isa
from polygraft_kernels.native.pages import Pages

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY, LAYERS = 576, 1536, 9, 3, 64, 49152, 30
QKV = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM)
LINEARS = {
    "qkv": (sum(QKV), HIDDEN),
    "o": (HIDDEN, HIDDEN),
    "gate_up": (2 * INTERMEDIATE, HIDDEN),
    "down": (HIDDEN, INTERMEDIATE),
    "lm_head": (VOCABULARY, HIDDEN),
}
PROBE_ROUNDS, PROBE_CHAINS = 100_000, 12
COLD_BYTES = 96 << 20
"""Weights touched between two uses of the same one: more than a last-level cache holds."""


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the machine can do at all, in this run."""

    gflops: float
    gbytes: float


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured call. `of_peak` is the larger of its shares of the two ceilings."""

    operation: str
    rows: int
    detail: str
    microseconds: float
    gflops: float
    gbytes: float
    of_peak: float


@dataclass(frozen=True, slots=True)
class Bench:
    """A backend and the ceilings its figures are held against."""

    backend: NativeBackend
    dtype: torch.dtype
    seconds: float
    ceilings: Ceilings

    def figure(
        self, operation: str, rows: int, detail: str, calls: list[Callable[[], object]], flops: float, size: float
    ) -> Figure:
        """Time `calls` in turn; flops and bytes are those of one of them."""
        spent = best_time(calls, self.seconds)
        gflops, gbytes = flops / spent / 1e9, size / spent / 1e9
        share = max(gflops / self.ceilings.gflops, gbytes / self.ceilings.gbytes)
        return Figure(operation, rows, detail, spent * 1e6, gflops, gbytes, share)


def best_time(calls: list[Callable[[], object]], seconds: float) -> float:
    """Seconds per call: the mean of every call's best of several passes, for neighbours only ever make them slower."""
    best = [float("inf")] * len(calls)
    end = time.perf_counter() + seconds
    passes = 0
    while passes < 3 or time.perf_counter() < end:
        for i, call in enumerate(calls):
            start = time.perf_counter()
            call()
            best[i] = min(best[i], time.perf_counter() - start)
        passes += 1
    return sum(best) / len(best)


class Probe:
    """The machine's ceilings: multiply-adds from registers, and reading 256 MiB, on torch's number of threads."""

    def __init__(self, backend: NativeBackend) -> None:
        self._unit = backend.unit
        self._memory = Pages().zeros((64 << 20,), torch.float32).fill_(1.0).split(1 << 20)

    def best(self) -> Ceilings:
        """Those of the best moments within a second or two."""
        reads = [partial(self._read, part) for part in self._memory]
        return self._ceilings(best_time([self._multiply], 0.3), best_time(reads, 1.0) * len(reads))

    def now(self) -> Ceilings:
        """Those of this moment: machines that are shared change from one to the next."""
        start = time.perf_counter()
        self._multiply()
        between = time.perf_counter()
        for part in self._memory:
            self._read(part)
        return self._ceilings(between - start, time.perf_counter() - between)

    def _multiply(self) -> None:
        self._unit.fma_peak(PROBE_ROUNDS, torch.get_num_threads())

    def _read(self, part: Tensor) -> None:
        self._unit.memory_read(part.data_ptr(), part.numel(), torch.get_num_threads())

    def _ceilings(self, multiplying: float, reading: float) -> Ceilings:
        flops = 2.0 * self._unit.lanes * PROBE_CHAINS * PROBE_ROUNDS * torch.get_num_threads()
        return Ceilings(flops / multiplying / 1e9, sum(part.nbytes for part in self._memory) / reading / 1e9)


def linear_figures(bench: Bench, all_rows: list[int], names: list[str]) -> Iterator[Figure]:
    """`linear` on cold weights."""
    for name in names:
        outputs, inputs = LINEARS[name]
        size = outputs * inputs * bench.dtype.itemsize
        weight = torch.randn(outputs, inputs, dtype=bench.dtype)
        packed = [bench.backend.pack_linear(weight) for _ in range(max(1, COLD_BYTES // size))]
        for rows in all_rows:
            x = torch.randn(rows, inputs, dtype=bench.dtype)
            used = packed if rows <= 64 else packed[: max(1, len(packed) * 64 // rows)]
            calls: list[Callable[[], object]] = [lambda w=w, x=x: bench.backend.linear(x, w) for w in used]
            yield bench.figure(
                "linear " + name, rows, f"{outputs}x{inputs}", calls, 2.0 * rows * outputs * inputs, size
            )


def layer_figures(bench: Bench, rows: int, context: int, adapters: int, ranks: tuple[int, ...]) -> Figure:
    """A whole decoder layer in decode, `adapters` of mixed ranks shared evenly by the rows."""
    layers = [_layer(bench, adapters, ranks) for _ in range(LAYERS)]
    blocks = -(-context // 16)
    caches = [bench.backend.kv_cache(rows * blocks, 16, KV_HEADS, HEAD_DIM, bench.dtype) for _ in range(LAYERS)]
    groups = LoraGroups()
    if adapters:
        groups = LoraGroups(tuple(range(adapters)), tuple(rows * i // adapters for i in range(adapters + 1)))
    step = _decode_step(rows, context, groups)
    table = torch.zeros(context + 1, 2, HEAD_DIM // 2)
    x = torch.randn(rows, HIDDEN, dtype=bench.dtype)
    calls: list[Callable[[], object]] = [
        lambda layer=layer, cache=cache: bench.backend.decoder_layer(x, layer, cache, step, table)
        for layer, cache in zip(layers, caches, strict=True)
    ]
    weights = sum(n * k for name, (n, k) in LINEARS.items() if name != "lm_head")
    detail = f"context {context}, {adapters} adapters" if adapters else f"context {context}, base"
    return bench.figure("layer", rows, detail, calls, 2.0 * rows * weights, weights * bench.dtype.itemsize)


def lora_figures(bench: Bench, rows: int, adapters: int, ranks: tuple[int, ...]) -> Figure:
    """`lora` alone on qkv."""
    bank = _bank(bench, HIDDEN, QKV, adapters, ranks)
    groups = LoraGroups(tuple(range(adapters)), tuple(rows * i // adapters for i in range(adapters + 1)))
    x = torch.randn(rows, HIDDEN, dtype=bench.dtype)
    y = torch.zeros(rows, sum(QKV), dtype=bench.dtype)
    flops = size = 0.0
    for slot in range(adapters):
        rank = ranks[slot % len(ranks)]
        weights = rank * (3 * HIDDEN + sum(QKV))
        flops += 2.0 * weights * (groups.starts[slot + 1] - groups.starts[slot])
        size += weights * bench.dtype.itemsize
    detail = f"{adapters} adapters, ranks {min(ranks)}-{max(ranks)}"
    return bench.figure("lora qkv", rows, detail, [lambda: bench.backend.lora(y, x, bank, groups)], flops, size)


def attention_figures(bench: Bench, sequences: int, context: int, queries: int) -> Figure:
    """`attention`: the last `queries` rows of every sequence."""
    cache = bench.backend.kv_cache(sequences * -(-context // 16), 16, KV_HEADS, HEAD_DIM, bench.dtype)
    step = _decode_step(sequences, context, LoraGroups(), queries)
    rows = sequences * queries
    q = torch.randn(rows, HEADS, HEAD_DIM, dtype=bench.dtype)
    seen = sequences * sum(context - queries + i + 1 for i in range(queries))
    flops = 4.0 * seen * HEADS * HEAD_DIM
    size = 2.0 * sequences * context * KV_HEADS * HEAD_DIM * bench.dtype.itemsize
    calls: list[Callable[[], object]] = [lambda: bench.backend.attention(q, cache, step, None)]
    return bench.figure("attention", rows, f"{sequences} sequences, context {context}", calls, flops, size)


def _decode_step(sequences: int, context: int, groups: LoraGroups, queries: int = 1) -> StepTensors:
    blocks = -(-context // 16)
    tables = torch.randperm(sequences * blocks).to(torch.int32).view(sequences, blocks)
    positions = torch.arange(context - queries, context)
    slots = tables[:, positions // 16].long() * 16 + positions % 16
    return StepTensors(
        positions.repeat(sequences),
        slots.flatten(),
        torch.arange(sequences + 1, dtype=torch.int32) * queries,
        torch.full((sequences,), context, dtype=torch.int32),
        tables,
        groups,
    )


def _bank(bench: Bench, inputs: int, segments: tuple[int, ...], adapters: int, ranks: tuple[int, ...]) -> LoraBank:
    bank = bench.backend.lora_bank(inputs, segments, adapters, bench.dtype)
    for slot in range(adapters):
        rank = ranks[slot % len(ranks)]
        bank.load(slot, [LoraPair(_small(bench, rank, inputs), _small(bench, n, rank), 1.0) for n in segments])
    return bank


def _small(bench: Bench, *shape: int) -> Tensor:
    return (torch.randn(*shape) * 0.01).to(bench.dtype)


def _layer(bench: Bench, adapters: int, ranks: tuple[int, ...]) -> DecoderLayer:
    def linear(name: str, segments: tuple[int, ...]) -> LoraLinear:
        outputs, inputs = LINEARS[name]
        bank = _bank(bench, inputs, segments, adapters, ranks) if adapters else None
        return LoraLinear(bench.backend.pack_linear(_small(bench, outputs, inputs)), bank)

    norm = torch.ones(HIDDEN, dtype=bench.dtype)
    return DecoderLayer(
        norm,
        linear("qkv", QKV),
        None,
        None,
        linear("o", (HIDDEN,)),
        norm,
        linear("gate_up", (INTERMEDIATE, INTERMEDIATE)),
        linear("down", (HIDDEN,)),
        HEADS,
        KV_HEADS,
        HEAD_DIM,
        1e-5,
        None,
    )


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--isa", default=None, help="instruction set; the fastest of this processor")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32, 64, 128, 512])
    parser.add_argument("--linears", nargs="*", default=list(LINEARS))
    parser.add_argument("--only", choices=("linear", "lora", "attention", "layer"), default=None)
    parser.add_argument("--seconds", type=float, default=0.3, help="per figure")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    with _threads(chosen.threads):
        backend = create_isa(chosen.isa)
        bench = Bench(backend, getattr(torch, chosen.dtype), chosen.seconds, Probe(backend).best())
        figures = list(_figures(bench, chosen.rows, chosen.linears, chosen.only))
    if chosen.json:
        print(json.dumps({"ceilings": asdict(bench.ceilings), "figures": [asdict(figure) for figure in figures]}))
        return
    title = f"{backend.unit.isa}, {chosen.dtype}, {chosen.threads} threads; ceilings "
    table = Table(title=title + f"{bench.ceilings.gflops:.0f} GFLOP/s, {bench.ceilings.gbytes:.1f} GB/s")
    for column in ("operation", "rows", "detail", "us", "GFLOP/s", "GB/s", "of ceiling"):
        table.add_column(column, justify="left" if column in ("operation", "detail") else "right")
    for each in figures:
        measured = (f"{each.microseconds:.1f}", f"{each.gflops:.1f}", f"{each.gbytes:.1f}", f"{each.of_peak:.0%}")
        table.add_row(each.operation, str(each.rows), each.detail, *measured)
    Console().print(table)


def _figures(bench: Bench, rows: list[int], linears: list[str], only: str | None) -> Iterator[Figure]:
    ranks = (8, 16, 24, 32)
    if only in (None, "linear"):
        yield from linear_figures(bench, rows, linears)
    if only in (None, "lora"):
        for adapters in (1, 8, 16):
            yield lora_figures(bench, 16, adapters, ranks)
    if only in (None, "attention"):
        for sequences, context, queries in ((1, 512, 1), (16, 160, 1), (16, 512, 1), (1, 126, 126), (1, 4096, 1)):
            yield attention_figures(bench, sequences, context, queries)
    if only in (None, "layer"):
        for adapters in (0, 1, 8, 16):
            yield layer_figures(bench, 16, 160, adapters, ranks)
        yield layer_figures(bench, 1, 160, 0, ranks)


if __name__ == "__main__":
    main()
