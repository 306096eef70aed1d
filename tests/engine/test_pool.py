"""Requests against a small pool: what can never fit, what outgrows it, and nothing left behind."""

from __future__ import annotations

import pytest
from tests.engine.bench import Bench, generation, run

from polygraft_engine.engine import Engine
from polygraft_engine.types import InvalidRequest


def assert_idle(engine: Engine) -> None:
    engine.check()
    stats = engine.stats().scheduler
    assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
    assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
    engine.flush_prefix_cache()
    assert engine.stats().scheduler.blocks_free == stats.blocks_total


def test_a_prompt_larger_than_the_pool_is_refused_and_small_ones_go_on(bench: Bench) -> None:
    engine = bench.engine(num_blocks=6)
    with pytest.raises(InvalidRequest, match="at most 96 tokens") as refused:
        engine.add(generation("large", bench.prompt(97)))
    assert refused.value.code == "context_length_exceeded"
    small = [generation(str(index), bench.prompt(6, seed=index)) for index in range(10)]
    assert all(len(result.tokens) == 8 for result in run(engine, small).values())
    assert_idle(engine)


def test_growth_past_the_pool_ends_with_length(bench: Bench) -> None:
    engine = bench.engine(num_blocks=6)
    large = generation("large", bench.prompt(80), max_tokens=100)
    small = [generation(str(index), bench.prompt(6, seed=index)) for index in range(10)]
    results = run(engine, [large, *small])
    assert results["large"].finish_reason == "length"
    assert len(results["large"].tokens) == 96 - 80
    assert all(len(results[each.id].tokens) == 8 for each in small)
    assert_idle(engine)


def test_two_that_fit_alone_but_not_together_both_end(bench: Bench) -> None:
    engine = bench.engine(num_blocks=8, max_num_batched_tokens=10, prefix_caching=False)
    pair = [generation(str(index), bench.prompt(70, seed=index), max_tokens=20) for index in range(2)]
    results = run(engine, pair)
    for each in pair:
        assert results[each.id].tokens == run(bench.engine(), [each])[each.id].tokens
    assert_idle(engine)


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [16, 128])
def test_nothing_is_left_after_many_mixed_requests(bench: Bench, blocks: int) -> None:
    adapters = [None, bench.adapter("a1"), bench.adapter("a2"), bench.adapter("a3")]
    engine = bench.engine(num_blocks=blocks, max_loras=2, max_num_seqs=16)
    live: set[str] = set()
    for index in range(240):
        prompt = (*bench.prompt(16 + 16 * (index % 2)), *bench.prompt(1 + index % 9, seed=index))
        each = generation(
            str(index),
            prompt,
            adapters[index % 4],
            choice=index % 2,
            n=2,
            temperature=float(index % 3 > 0),
            seed=index,
            max_tokens=1 + index % 6,
            stop_token_ids=tuple(range(3, 3 + index % 30)),
            prompt_logprobs=0 if index % 7 == 0 else None,
        )
        engine.add(each)
        live.add(each.id)
        with pytest.raises(InvalidRequest):
            engine.add(generation("refused", (999,)))
        for output in engine.step():
            if output.finish_reason is not None:
                live.discard(output.id)
        if index % 5 == 0 and live:
            live.discard(victim := min(live))
            assert engine.cancel(victim)
        engine.check()
    while engine.has_work:
        live -= {output.id for output in engine.step() if output.finish_reason is not None}
    assert live == set()
    assert_idle(engine)
