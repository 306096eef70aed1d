"""Where the time of a step goes: `python benchmarks/step.py MODEL [--rows 16] [--context 128] [--adapters 0] ...`.

Fills an engine with prompts of random tokens, then times decode steps, phase by phase, in milliseconds. With
`--operations` a second engine runs the same steps one operation at a time, and each is held against its floor: the
multiply-adds and the bytes from memory that it cannot do without, at the ceilings measured in the same run. The first
engine's whole steps are held against the ceilings of their own moments, measured between them.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass, fields
from pathlib import Path

import timed
from filled import Work, filled_engine
from rich.console import Console
from rich.table import Table
from timed import TimedBackend

from kernels import Ceilings, Probe
from polygraft_engine.engine import Engine
from polygraft_engine.options import EngineOptions
from polygraft_engine.stats import StepPhases
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
        backend = timed.create.latest
        assert backend is not None, "the engine was built with it"
        operations(backend, len(one_by_one))
        whole_steps(backend, len(one_by_one), decode)


def run(
    arguments: argparse.Namespace, kernels: str, probe: Probe | None = None
) -> tuple[list[StepPhases], list[Decode], Engine]:
    """The phases of prefill steps, the decode steps with the ceilings that `probe` finds after each, and the engine."""
    options = EngineOptions(
        model=arguments.model,
        kernels=kernels,
        dtype=arguments.dtype,
        quantization=arguments.quantization,
        threads=arguments.threads,
    )
    work = Work(
        arguments.rows,
        arguments.context,
        arguments.steps + 50,
        arguments.adapters,
        arguments.rank,
        arguments.temperature,
        arguments.top_p,
    )
    engine = filled_engine(options, work)
    prefill: list[StepPhases] = []
    decode: list[Decode] = []
    while engine.has_work and len(decode) < arguments.steps:
        before = engine.stats().computed_tokens
        engine.step()
        stats = engine.stats()
        rows = stats.computed_tokens - before
        if rows != arguments.rows:
            prefill.append(stats.last_step)
            if timed.create.latest is not None:
                timed.create.latest.spent = {}
        else:
            decode.append(Decode(stats.last_step, probe.now() if probe is not None else None))
    return prefill, decode, engine


if __name__ == "__main__":
    main()
