"""What quantization does to a model's predictions: `python benchmarks/perplexity.py MODEL [TEXT ...] [--json]`.

Perplexity over windows of the given texts; by default of this project's own decision records, which no model has seen.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from polygraft_engine.llm import LLM
from polygraft_engine.types import SamplingParams

TEXTS = sorted((Path(__file__).parents[1] / "docs" / "adr").glob("*.md"))
SCORE = SamplingParams(max_tokens=1, temperature=0.0, seed=0, prompt_logprobs=0)


def windows(llm: LLM, texts: list[Path], length: int) -> list[tuple[int, ...]]:
    """The texts one after the other, cut into windows of `length` tokens; the last may be shorter."""
    tokens = llm.encode("\n\n".join(path.read_text(encoding="utf-8") for path in texts))
    return [tokens[start : start + length] for start in range(0, len(tokens) - 1, length)]


def perplexity(llm: LLM, pieces: list[tuple[int, ...]], title: str) -> tuple[float, int]:
    """exp of the mean negative log probability of every token but each window's first, and how many those are."""
    total, count = 0.0, 0
    for piece in track(pieces, title, console=Console(stderr=True)):
        scored = llm.generate([piece], SCORE)[0].prompt_logprobs
        assert scored is not None
        total -= sum(entry.logprob for entry in scored)
        count += len(scored)
    return math.exp(total / count), count


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("texts", nargs="*", type=Path, default=TEXTS)
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--window", type=int, default=512, help="tokens")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    figures = []
    for dtype in arguments.dtypes:
        for quantization in (None, "int8"):
            llm = LLM(arguments.model, kernels=arguments.kernels, dtype=dtype, quantization=quantization)
            name = dtype if quantization is None else f"{dtype}, {quantization} weights"
            value, tokens = perplexity(llm, windows(llm, arguments.texts, arguments.window), name)
            figures.append({"numbers": name, "perplexity": value, "tokens": tokens})
    if arguments.json:
        print(json.dumps(figures))
        return
    table = Table(title=f"{Path(arguments.model).name}, {figures[0]['tokens']} tokens in windows of {arguments.window}")
    table.add_column("numbers")
    table.add_column("perplexity", justify="right")
    for figure in figures:
        table.add_row(str(figure["numbers"]), f"{figure['perplexity']:.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
