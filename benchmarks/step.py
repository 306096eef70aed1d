"""Where the time of a step goes: `python benchmarks/step.py MODEL [--rows 16] [--context 128] [--adapters 0] ...`.

Fills an engine with prompts of random tokens, then times decode steps, phase by phase, in milliseconds. With
`--operations` a second engine runs the same steps one operation at a time, and each is held against its floor: the
multiply-adds and the bytes from memory that it cannot do without, at the ceilings measured in the same run. The first
engine's whole steps are held against the ceilings of their own moments, measured between them.
"""

from __future__ import annotations

import argparse
import random
import statistics
from dataclasses import dataclass, fields
from pathlib import Path

import timed
import torch
from rich.console import Console
from rich.table import Table
from timed import TimedBackend

from kernels import Ceilings, Probe
from polygraft_adapters.types import AdapterInfo, ModuleKey, ModuleShapes
from polygraft_adapters.weights import AdapterWeights, ModuleDelta
from polygraft_engine.adapter_source import DictSource
from polygraft_engine.build import build_engine
from polygraft_engine.engine import Engine
from polygraft_engine.models.architecture import read_spec
from polygraft_engine.models.loading import resolve_model
from polygraft_engine.options import EngineOptions
from polygraft_engine.stats import StepPhases
from polygraft_engine.types import Generation, SamplingParams
from polygraft_kernels.native import create_isa
from polygraft_kernels.registry import BACKENDS


@dataclass(frozen=True, slots=True)
class Decode:
    """A decode step, and what the machine could do right after it."""

    phases: StepPhases
    ceilings: Ceilings | None

    @property
    def seconds(self) -> float:
        """Of the forward pass with its head."""
        return self.phases.forward + self.phases.sample


def random_adapter(modules: ModuleShapes, index: int, rank: int, dtype: torch.dtype) -> AdapterWeights:
    """An adapter on all seven modules, small enough to leave the activations sane."""
    pairs = {
        ModuleKey(layer, target): ModuleDelta(
            torch.randn(rank, in_features).to(dtype) * 0.01, torch.randn(out_features, rank).to(dtype) * 0.01, 1.0
        )
        for layer in range(modules.layers)
        for target, (out_features, in_features) in modules.shapes.items()
    }
    info = AdapterInfo(f"random-{index}", rank, 1.0, tuple(modules.shapes), 0, None, ())
    return AdapterWeights(info, pairs)


def fill(engine: Engine, arguments: argparse.Namespace, digests: list[str]) -> None:
    """One sequence per row; with adapters, row i runs on adapter i modulo their number."""
    draw = random.Random(0)
    params = SamplingParams(
        max_tokens=arguments.steps + 50,
        seed=0,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        ignore_eos=True,
    )
    for row in range(arguments.rows):
        prompt = tuple(draw.randrange(3, engine.spec.vocab) for _ in range(arguments.context))
        adapter = digests[row % len(digests)] if digests else None
        engine.add(Generation(id=str(row), prompt=prompt, params=params, adapter=adapter))


def report(title: str, phases: list[StepPhases]) -> None:
    """Medians in milliseconds."""
    names = [field.name for field in fields(StepPhases)] + ["total"]
    medians = {name: statistics.median(getattr(each, name) for each in phases) * 1e3 for name in names}
    print(f"{title:>8}", "  ".join(f"{name} {value:.3f}" for name, value in medians.items()), f"({len(phases)} steps)")


def operations(backend: TimedBackend, steps: int) -> None:
    """What each operation took of a step, in milliseconds, beside its floor."""
    ceilings = Probe(backend).best()
    table = Table(title=f"one step; ceilings {ceilings.gflops:.0f} GFLOP/s, {ceilings.gbytes:.1f} GB/s")
    for column in ("operation", "calls", "ms", "GFLOP/s", "GB/s", "floor ms", "of floor"):
        table.add_column(column, justify="left" if column == "operation" else "right")
    for name, spent in sorted(backend.spent.items(), key=lambda item: -item[1].seconds):
        floor = max(spent.flops / ceilings.gflops, spent.bytes / ceilings.gbytes) / 1e9
        numbers = (spent.seconds / steps * 1e3, spent.flops / spent.seconds / 1e9, spent.bytes / spent.seconds / 1e9)
        row = [f"{number:.2f}" for number in (*numbers, floor / steps * 1e3)]
        table.add_row(name, str(spent.calls // steps), *row, f"{floor / spent.seconds:.0%}")
    Console().print(table)


def whole_steps(backend: TimedBackend, steps: int, decode: list[Decode]) -> None:
    """How near whole forward passes come to reading memory and to multiplying, all at the same time."""
    flops, size = (sum(getattr(each, name) for each in backend.spent.values()) / steps for name in ("flops", "bytes"))
    shares = [
        (size / each.ceilings.gbytes / 1e9 / each.seconds, flops / each.ceilings.gflops / 1e9 / each.seconds)
        for each in decode
        if each.ceilings is not None
    ]
    memory, multiplying = (statistics.median(share) for share in zip(*shares, strict=True))
    larger = statistics.median(map(max, shares))
    print(f"of memory's bandwidth {memory:.0%}, of multiply-adds {multiplying:.0%}, of the larger floor {larger:.0%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--adapters", type=int, default=0)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", choices=("int8",))
    parser.add_argument("--threads", type=int)
    parser.add_argument("--operations", action="store_true", help="time every operation too, on native kernels")
    arguments = parser.parse_args()

    probe = Probe(create_isa(None)) if arguments.operations else None
    prefill, decode, engine = run(arguments, arguments.kernels, probe)
    print(f"{Path(arguments.model).name}: {engine.info.numerics_id}, {engine.limits.num_blocks} blocks")
    report("prefill", prefill)
    report("decode", [each.phases for each in decode])
    if arguments.operations:
        BACKENDS["timed"] = timed.__name__
        _, one_by_one, _ = run(arguments, "timed")
        report("one by one", [each.phases for each in one_by_one])
        operations(timed.last(), len(one_by_one))
        whole_steps(timed.last(), len(one_by_one), decode)


def run(
    arguments: argparse.Namespace, kernels: str, probe: Probe | None = None
) -> tuple[list[StepPhases], list[Decode], Engine]:
    """The phases of prefill steps, the decode steps with the ceilings that `probe` finds after each, and the engine."""
    source = DictSource()
    options = EngineOptions(
        model=arguments.model,
        kernels=kernels,
        dtype=arguments.dtype,
        quantization=arguments.quantization,
        threads=arguments.threads,
        max_loras=max(1, arguments.adapters),
        prefix_caching=False,
    )
    engine = build_engine(options, source)
    modules = read_spec(resolve_model(arguments.model)).module_shapes("")
    dtype = getattr(torch, engine.info.dtype)
    digests = [source.put(random_adapter(modules, index, arguments.rank, dtype)) for index in range(arguments.adapters)]
    fill(engine, arguments, digests)
    prefill: list[StepPhases] = []
    decode: list[Decode] = []
    while engine.has_work and len(decode) < arguments.steps:
        before = engine.stats().computed_tokens
        engine.step()
        stats = engine.stats()
        rows = stats.computed_tokens - before
        if rows != arguments.rows:
            prefill.append(stats.last_step)
            timed.reset()
        else:
            decode.append(Decode(stats.last_step, probe.now() if probe is not None else None))
    return prefill, decode, engine


if __name__ == "__main__":
    main()
