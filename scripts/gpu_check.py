"""Everything to find out on a machine with a GPU: `python scripts/gpu_check.py [--model FOLDER] [--json FILE]`.

Conformance of the Triton kernels on the device; each operation's time against the larger of its floors in bytes and
FLOP, by ceilings measured in the same run; what adapters cost beside their base, by batch, popularity and rank; tokens
a second of a whole engine, with captured graphs and without; FlashInfer's attention beside ours where it is installed.
Prints a table, writes JSON. Exit code 1: conformance fails; 2: there is no GPU. `--smoke` runs it at tiny shapes in
Triton's interpreter.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import triton
from gpu.adapters import adapter_cost
from gpu.bench import LAYER_OF_8B, TINY, Bench, Clock, Figure, ceilings
from gpu.engine import random_model, tokens_per_second
from gpu.operations import operations
from rich.console import Console
from rich.table import Table

from polygraft_kernels.triton import INTERPRETED, TritonBackend

ROOT = Path(__file__).parent.parent
RUNNING = "tests/kernels/triton/running"
CONFORMANCE = (
    "tests/conformance",
    *(f"{RUNNING}/test_{name}.py" for name in ("engine", "graphs", "invariance", "linear")),
)


class OnDevice:
    """A pytest plugin: tensors are made on the GPU unless a test says otherwise; counts what passes."""

    def __init__(self) -> None:
        self.passed, self.failed = 0, 0

    def pytest_configure(self) -> None:
        torch.set_default_device("cuda")

    def pytest_unconfigure(self) -> None:
        torch.set_default_device(None)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed += report.when == "call" and report.passed
        self.failed += report.failed


def conformance() -> OnDevice:
    """The suites over the Triton backends, on the device."""
    plugin = OnDevice()
    paths = [str(ROOT / path) for path in CONFORMANCE]
    code = pytest.main(
        ["-q", "-k", "triton", "-m", "slow or not slow", "--rootdir", str(ROOT), *paths], plugins=[plugin]
    )
    plugin.failed += code != 0 and plugin.failed == 0
    return plugin


def table_of(figures: Sequence[Figure]) -> Table:
    """All figures as one table."""
    table = Table("section", "what", "rows", "detail", "measured", "floor", "of floor", "beside", "ratio")
    for figure in figures:
        floor = "" if figure.floor is None else f"{figure.floor:.1f}"
        share = "" if figure.floor is None else f"{figure.floor / figure.value:.0%}"
        beside = "" if figure.against is None else f"{figure.against:.1f}"
        ratio = "" if figure.against is None else f"{figure.value / figure.against:.2f}"
        measured = f"{figure.value:.1f} {figure.unit}"
        table.add_row(
            figure.section, figure.name, str(figure.batch), figure.detail, measured, floor, share, beside, ratio
        )
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Run everything; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a model folder for the engine's figures; default: random weights")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes in Triton's interpreter (TRITON_INTERPRET=1)")
    parser.add_argument("--skip-conformance", action="store_true")
    chosen = parser.parse_args(arguments)
    console = Console(width=140)
    if chosen.smoke and not INTERPRETED:
        console.print("--smoke needs Triton's interpreter: set TRITON_INTERPRET=1")
        return 2
    if not chosen.smoke and (INTERPRETED or not torch.cuda.is_available()):
        console.print("there is no GPU here that torch sees (or TRITON_INTERPRET is set): nothing was measured")
        return 2
    machine = "Triton's interpreter" if chosen.smoke else torch.cuda.get_device_name()
    checked = None if chosen.smoke or chosen.skip_conformance else conformance()
    clock = Clock(chosen.smoke)
    backend = TritonBackend(torch.device("cpu" if chosen.smoke else "cuda"))
    bench = Bench(backend, TINY if chosen.smoke else LAYER_OF_8B, clock, *ceilings(clock, chosen.smoke))
    with torch.inference_mode(), tempfile.TemporaryDirectory() as folder:
        figures = [*operations(bench), *adapter_cost(bench)]
        model = random_model(Path(folder), chosen.smoke) if chosen.model is None else chosen.model
        figures += tokens_per_second(model, chosen.smoke)
    console.print(f"{machine}: {bench.bytes_per_second / 1e9:.0f} GB/s, {bench.flops_per_second / 1e12:.1f} TFLOP/s")
    console.print(table_of(figures))
    if checked is not None:
        console.print(f"conformance on the device: {checked.passed} passed, {checked.failed} failed")
    if chosen.json is not None:
        result = {
            "machine": machine,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "bytes_per_second": bench.bytes_per_second,
            "flops_per_second": bench.flops_per_second,
            "conformance": None if checked is None else {"passed": checked.passed, "failed": checked.failed},
            "figures": [asdict(figure) for figure in figures],
        }
        chosen.json.write_text(json.dumps(result, indent=1))
    return 1 if checked is not None and checked.failed else 0


if __name__ == "__main__":
    sys.exit(main())
