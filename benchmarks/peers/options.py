"""The command line that the comparisons share."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from .environments import ROOT
from .errors import PeerError
from .loads import Load, select

DEMO_MODEL = ROOT / ".cache" / "SmolLM2-135M-Instruct"


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked for."""

    model: Path
    loads: tuple[Load, ...]
    rounds: int
    per_stream: int
    """Requests for each stream of a load."""
    peer_dtype: str
    """What the peer computes in; ours takes the checkpoint's own type."""
    json: bool


def parse(doc: str | None, loads: Sequence[Load], arguments: Sequence[str] | None = None) -> Options:
    """From the command line. Exits with a message where it makes no sense."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, default=DEMO_MODEL, help="a Hugging Face folder (default: the demo model's)"
    )
    parser.add_argument("--loads", help=f"some of {','.join(load.name for load in loads)} (default: all)")
    parser.add_argument("--rounds", type=int, help="times that both sides are measured (default: 3)")
    parser.add_argument("--requests", type=int, help="requests for each stream of a load (default: 4)")
    parser.add_argument("--quick", action="store_true", help="one round, one request for each stream: a trial run")
    parser.add_argument(
        "--peer-dtype",
        choices=("auto", "bfloat16", "float32"),
        default="auto",
        help="what the peer computes in (default: bfloat16 with AVX-512, else float32, which is then its faster one)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    found = parser.parse_args(arguments)
    rounds, per_stream = (1, 1) if found.quick else (3, 4)
    rounds = rounds if found.rounds is None else found.rounds
    per_stream = per_stream if found.requests is None else found.requests
    if rounds < 1 or per_stream < 1:
        parser.error("--rounds and --requests are at least 1")
    if not (found.model / "config.json").is_file():
        parser.error(f"{found.model} holds no model; `polygraft demo-model {DEMO_MODEL}` makes the demo model")
    try:
        chosen = select(loads, found.loads)
    except PeerError as error:
        parser.error(str(error))
    return Options(
        found.model.resolve(), chosen, rounds, per_stream, peer_dtype(found.peer_dtype, cpu_flags()), found.json
    )


def peer_dtype(asked: str, flags: Collection[str]) -> str:
    """bfloat16 with AVX-512, else float32 unless told otherwise.

    oneDNN's bfloat16 products need AVX-512; without it they take three times as long as float32's at 16 rows (measured
    on a Zen 3), and more at more.
    """
    if asked != "auto":
        return asked
    return "bfloat16" if "avx512f" in flags else "float32"


def cpu_flags() -> frozenset[str]:
    """The processor's features, as Linux names them; none where it does not tell."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return frozenset(line.split(":", 1)[1].split())
    return frozenset()
