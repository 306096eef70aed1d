"""Adapters of more than pairs on Triton kernels: DoRA, biases, and what can be done to embed_tokens and lm_head."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.engine.bench import TINY_CONFIG, Bench, Result, generation, run, write_model

from polygraft_adapters.types import EMBEDDING, HEAD, ModuleKey
from polygraft_adapters.weights import AdapterWeights, ModuleDelta, TableDelta, TokenRows
from polygraft_engine.adapter_source import DictSource


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A tiny model whose projections have biases."""
    config = {**TINY_CONFIG, "attention_bias": True, "num_hidden_layers": 1, "vocab_size": 48}
    return Bench(write_model(tmp_path_factory.mktemp("models") / "biased", config))


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))) * 0.5


def adapters(bench: Bench) -> list[AdapterWeights]:
    """One with DoRA and LoRA on both tables, one with another head and embeddings of its own for two tokens."""
    shapes = bench.spec.module_shapes("").shapes
    vocabulary, hidden, info = bench.spec.vocab, bench.spec.hidden, bench.weights("a1").info

    def delta(out_features: int, in_features: int, magnitude: torch.Tensor | None = None) -> ModuleDelta:
        return ModuleDelta(rand(3, in_features), rand(out_features, 3), 0.5, magnitude=magnitude)

    q, down = shapes["q_proj"], shapes["down_proj"]
    pairs = {ModuleKey(0, "q_proj"): delta(*q, rand(q[0]).abs()), ModuleKey(0, "down_proj"): delta(*down)}
    lora = {
        EMBEDDING: TableDelta(lora=delta(hidden, vocabulary, rand(hidden).abs())),
        HEAD: TableDelta(lora=delta(vocabulary, hidden)),
    }
    whole = {
        EMBEDDING: TableDelta(tokens=TokenRows((7, 5), rand(2, hidden))),
        HEAD: TableDelta(weight=rand(vocabulary, hidden), tokens=TokenRows((4,), rand(1, hidden))),
    }
    biases = {ModuleKey(0, "k_proj"): rand(shapes["k_proj"][0])}
    return [AdapterWeights(info, pairs, tables=lora), AdapterWeights(info, {}, biases=biases, tables=whole)]


def answers(bench: Bench, kernels: str) -> dict[str, Result]:
    """The base and both adapters in one batch."""
    source = DictSource()
    engine = bench.engine(kernels=kernels, dtype="float32", source=source)
    with np.errstate(all="ignore"):
        for name, weights in zip("ab", adapters(bench), strict=True):
            source.put(engine.prepare(replace(weights, info=replace(weights.info, digest=name))))
        return run(
            engine,
            [
                generation(str(name), (7, 4, 5, 9), name, max_tokens=2, logprobs=bench.spec.vocab)
                for name in (None, "a", "b")
            ],
        )


def test_triton_computes_what_the_reference_does(bench: Bench) -> None:
    expected, got = answers(bench, "reference"), answers(bench, "triton")
    assert len({tuple(each.tokens) for each in expected.values()}) > 1
    for id, result in got.items():
        assert result.tokens == expected[id].tokens
        for mine, theirs in zip(result.logprobs, expected[id].logprobs, strict=True):
            assert dict(mine.top) == pytest.approx(dict(theirs.top), abs=1e-4)
