"""Decode steps of our engine; run as a program, prints one JSON object.

`python -m peers.engine_decode MODEL --streams 16 --prompt 126 --tokens 64 ... [--adapter FOLDER]`: no HTTP, no text; a
step is everything from scheduling to greedy sampling.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import torch

from polygraft_adapters.weights import load_adapter
from polygraft_engine.adapter_source import DictSource
from polygraft_engine.build import build_engine
from polygraft_engine.models.architecture import read_spec
from polygraft_engine.options import EngineOptions
from polygraft_engine.types import Generation, SamplingParams


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--prompt", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--adapter", type=Path)
    chosen = parser.parse_args()

    source = DictSource()
    engine = build_engine(EngineOptions(model=str(chosen.model), prefix_caching=False), source)
    digest = None
    if chosen.adapter is not None:
        modules = read_spec(chosen.model).module_shapes(chosen.model.name)
        digest = source.put(load_adapter(chosen.adapter, modules, 64, getattr(torch, engine.info.dtype)))
    draw = random.Random(chosen.seed)
    # One token more than is timed: the last prefill step makes the first.
    params = SamplingParams(max_tokens=chosen.tokens + 1, temperature=0.0, seed=0, ignore_eos=True)
    seconds, steps = 0.0, 0
    for repeat in range(chosen.repeats):
        for row in range(chosen.streams):
            prompt = tuple(draw.randrange(3, engine.spec.vocab) for _ in range(chosen.prompt))
            engine.add(Generation(id=f"{repeat}-{row}", prompt=prompt, params=params, adapter=digest))
        while engine.has_work:
            before = engine.stats().computed_tokens
            began = time.perf_counter()
            engine.step()
            took = time.perf_counter() - began
            # A step in which every stream decodes, and nothing else is computed.
            if engine.stats().computed_tokens - before == chosen.streams:
                seconds += took
                steps += 1
    print(json.dumps({"tokens_per_second": chosen.streams * steps / seconds, "steps": steps}))


if __name__ == "__main__":
    main()
