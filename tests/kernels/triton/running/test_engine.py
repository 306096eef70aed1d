"""An engine on Triton kernels answers as one on the reference does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.engine.bench import TINY_CONFIG, Bench, Result, generation, run, write_model


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """One tiny model, and two adapters of different ranks."""
    folder: Path = tmp_path_factory.mktemp("models") / "tiny"
    bench = Bench(write_model(folder, TINY_CONFIG))
    assert bench.weights("a1").info.rank != bench.weights("a2").info.rank
    return bench


def answers(bench: Bench, kernels: str) -> dict[str, Result]:
    """The base and two adapters, greedy, in one batch of chunks and decode rows."""
    names = (None, "a1", "a2")
    sequences = [
        generation(
            str(name),
            bench.prompt(7 + 5 * index, seed=index),
            None if name is None else bench.adapter(name),
            max_tokens=4,
            logprobs=2,
        )
        for index, name in enumerate(names)
    ]
    with np.errstate(all="ignore"):
        return run(bench.engine(kernels=kernels, dtype="float32", max_num_batched_tokens=16), sequences)


@pytest.mark.parametrize("kernels", ["triton", "triton-invariant"])
def test_the_reference_and_triton_draw_the_same_tokens(bench: Bench, kernels: str) -> None:
    expected, got = answers(bench, "reference"), answers(bench, kernels)
    assert {id: each.tokens for id, each in got.items()} == {id: each.tokens for id, each in expected.items()}
    for id, result in got.items():
        theirs = [each.logprob for each in expected[id].logprobs]
        assert [each.logprob for each in result.logprobs] == pytest.approx(theirs, abs=1e-4)
