"""An engine with work in it, for the benchmarks that time its steps."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch

from polygraft_adapters.types import AdapterInfo, ModuleKey, ModuleShapes
from polygraft_adapters.weights import AdapterWeights, ModuleDelta
from polygraft_engine.adapter_source import DictSource
from polygraft_engine.build import build_engine
from polygraft_engine.engine import Engine
from polygraft_engine.models.architecture import read_spec
from polygraft_engine.models.loading import resolve_model
from polygraft_engine.options import EngineOptions
from polygraft_engine.types import Generation, SamplingParams


@dataclass(frozen=True, slots=True)
class Work:
    """Sequences of `context` random tokens each that go on for `tokens` more."""

    rows: int
    context: int
    tokens: int
    adapters: int = 0
    """Row i runs on adapter i modulo their number; 0 is the base model."""
    rank: int = 16
    temperature: float = 0.0
    top_p: float = 1.0


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


def filled_engine(options: EngineOptions, work: Work) -> Engine:
    """An engine that has been given the work, and has not begun it."""
    source = DictSource()
    engine = build_engine(replace(options, max_loras=max(1, work.adapters), prefix_caching=False), source)
    modules = read_spec(resolve_model(options.model)).module_shapes("")
    dtype = getattr(torch, engine.info.dtype)
    digests = [source.put(random_adapter(modules, index, work.rank, dtype)) for index in range(work.adapters)]
    draw = random.Random(0)
    params = SamplingParams(
        max_tokens=work.tokens, seed=0, temperature=work.temperature, top_p=work.top_p, ignore_eos=True
    )
    for row in range(work.rows):
        prompt = tuple(draw.randrange(3, engine.spec.vocab) for _ in range(work.context))
        adapter = digests[row % len(digests)] if digests else None
        engine.add(Generation(id=str(row), prompt=prompt, params=params, adapter=adapter))
    return engine
