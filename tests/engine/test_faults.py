"""What goes wrong inside a step ends the sequences it concerns, and nothing else."""

from __future__ import annotations

import pytest
import torch
from tests.engine.bench import Bench, generation, run
from torch import Tensor

from polygraft_engine.engine import Engine
from polygraft_kernels import reference
from polygraft_kernels.api import KVCache, PackedLinear, StepTensors
from polygraft_kernels.reference import ReferenceBackend


class FaultyBackend(ReferenceBackend):
    """The reference, which can be told to raise, or to spoil the logits of one row."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.raising = False
        self.spoiled: tuple[int, float] | None = None

    def attention(self, q: Tensor, cache: KVCache, step: StepTensors, window: int | None) -> Tensor:
        if self.raising:
            raise RuntimeError("out of memory")
        return super().attention(q, cache, step, window)

    def logits(self, x: Tensor, weight: PackedLinear) -> Tensor:
        y = super().logits(x, weight)
        if self.spoiled is not None:
            row, value = self.spoiled
            y[row] = value
        return y


@pytest.fixture
def faulty(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> tuple[Engine, FaultyBackend]:
    backend = FaultyBackend(torch.device("cpu"))
    monkeypatch.setattr(reference, "create", lambda device, dtype: backend)
    return bench.engine(), backend


def test_a_step_that_raises_fails_its_sequences_and_the_engine_lives(
    bench: Bench, faulty: tuple[Engine, FaultyBackend], caplog: pytest.LogCaptureFixture
) -> None:
    engine, backend = faulty
    for id in ("a", "b"):
        engine.add(generation(id, bench.prompt(20), prompt_logprobs=0))
    backend.raising = True
    outputs = engine.step()
    engine.check()
    assert {output.id for output in outputs} == {"a", "b"}
    assert all(output.finish_reason == "error" for output in outputs)
    assert all("out of memory" in str(output.error) for output in outputs)
    assert "a step of 2 sequences failed" in caplog.text
    assert engine.stats().failed_steps == 1
    assert engine.stats().scheduler.blocks_used == 0
    backend.raising = False
    again = run(engine, [generation("c", bench.prompt(20))])["c"]
    assert again.cached_tokens == 0, "blocks of a failed step were shared"
    assert again.tokens == run(bench.engine(), [generation("c", bench.prompt(20))])["c"].tokens


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"logprobs": 2}, {"temperature": 1.0, "top_p": 0.5}])
def test_numbers_that_are_not_finite_fail_their_own_sequence_only(
    bench: Bench, faulty: tuple[Engine, FaultyBackend], value: float, params: dict[str, float]
) -> None:
    engine, backend = faulty
    generations = [generation(id, bench.prompt(9, seed=index), **params) for index, id in enumerate("abc")]
    backend.spoiled = (1, value)
    for each in generations:
        engine.add(each)
    outputs = {output.id: output for output in engine.step()}
    engine.check()
    backend.spoiled = None
    assert outputs["b"].finish_reason == "error"
    assert outputs["b"].not_finite
    assert "not finite" in str(outputs["b"].error)
    assert outputs["b"].token_ids == ()
    expected = run(bench.engine(), generations)
    assert list(outputs["a"].token_ids) == expected["a"].tokens[:1]
    assert list(outputs["c"].token_ids) == expected["c"].tokens[:1]


def test_prompt_scores_that_are_not_finite_fail_their_sequence(
    bench: Bench, faulty: tuple[Engine, FaultyBackend]
) -> None:
    engine, backend = faulty
    backend.spoiled = (2, float("nan"))
    result = run(engine, [generation("a", bench.prompt(9), prompt_logprobs=0, max_tokens=0)])["a"]
    assert result.finish_reason == "error"
    assert result.prompt_logprobs is None


def test_a_cancelled_sequence_says_nothing_more_and_frees_everything(bench: Bench) -> None:
    engine = bench.engine(max_num_batched_tokens=8)
    engine.add(generation("a", bench.prompt(30), prompt_logprobs=0))
    engine.add(generation("b", bench.prompt(10)))
    engine.step()
    assert engine.cancel("a")
    assert not engine.cancel("a")
    seen = set()
    while engine.has_work:
        seen |= {output.id for output in engine.step()}
        engine.check()
    assert seen == {"b"}
    assert engine.stats().scheduler.blocks_used == 0


def test_a_step_without_work_is_nothing(bench: Bench) -> None:
    engine = bench.engine()
    assert engine.step() == []
    assert engine.stats().forward_passes == 0


def test_stats_tell_of_the_last_step(bench: Bench) -> None:
    engine = bench.engine()
    run(engine, [generation("a", bench.prompt(10), max_tokens=3)])
    stats = engine.stats()
    assert stats.forward_passes == 3
    assert stats.computed_tokens == 12
    assert stats.sampled_tokens == 3
    assert 0 < stats.last_step.forward < stats.last_step.total <= stats.all_steps.total
