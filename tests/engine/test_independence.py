"""What a sequence yields does not depend on its neighbours, its chunks, preemption or the prefix cache."""

from __future__ import annotations

import pytest
from tests.engine.bench import ADAPTERS, Bench, Result, generation, mixed, run

from polygraft_engine.types import Generation


def alone(bench: Bench, generations: list[Generation]) -> dict[str, Result]:
    """Each in an engine of its own, with room for everything and no cache."""
    return {each.id: run(bench.engine(prefix_caching=False), [each])[each.id] for each in generations}


def assert_same(results: dict[str, Result], expected: dict[str, Result]) -> None:
    assert results.keys() == expected.keys()
    for id, result in results.items():
        assert result.tokens == expected[id].tokens
        assert result.finish_reason == expected[id].finish_reason
        for entry, other in zip(result.logprobs, expected[id].logprobs, strict=True):
            assert entry.token_id == other.token_id
            assert entry.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_a_batch_equals_each_alone(bench: Bench) -> None:
    generations = mixed(bench)
    engine = bench.engine()
    assert_same(run(engine, generations), alone(bench, generations))
    assert engine.stats().forward_passes == 8, "the sequences did not share their steps"


@pytest.mark.parametrize("budget", [5, 16, 23])
def test_chunks_change_nothing(bench: Bench, budget: int) -> None:
    generations = mixed(bench)
    engine = bench.engine(max_num_batched_tokens=budget)
    assert_same(run(engine, generations), alone(bench, generations))
    prompts = sum(len(each.prompt) for each in generations)
    assert engine.stats().forward_passes >= prompts / budget


def test_preemption_changes_nothing(bench: Bench) -> None:
    generations = mixed(bench, max_tokens=35)
    engine = bench.engine(num_blocks=10, prefix_caching=False)
    assert_same(run(engine, generations), alone(bench, generations))
    assert engine.stats().scheduler.preemptions > 0


def test_a_preempted_prompt_is_the_original_prompt_only(bench: Bench) -> None:
    pair = [
        generation(str(index), bench.prompt(34, seed=index), bench.adapter("a1"), max_tokens=35, n=2, choice=index)
        for index in range(2)
    ]
    engine = bench.engine(num_blocks=7)
    results = run(engine, pair)
    assert engine.stats().scheduler.preemptions > 0
    for each in pair:
        assert len(results[each.id].tokens) == 35
        assert results[each.id].finish_reason == "length"
        assert results[each.id].cached_tokens == 0, "recomputed tokens are no cache hit"
        assert results[each.id].tokens == run(bench.engine(), [each])[each.id].tokens


def test_prompt_logprobs_survive_preemption_and_chunks(bench: Bench) -> None:
    scored = generation("scored", bench.prompt(60), prompt_logprobs=0)
    expected = run(bench.engine(), [scored])["scored"].prompt_logprobs
    engine = bench.engine(num_blocks=12, max_num_batched_tokens=5, prefix_caching=False)
    for index in range(3):
        engine.add(generation(f"older {index}", bench.prompt(15, seed=index), max_tokens=60))
    while engine.stats().sampled_tokens < 3:
        engine.step()
    engine.add(scored)
    outputs = []
    while not outputs:
        outputs = [output for output in engine.step() if output.id == "scored"]
    assert engine.stats().scheduler.preemptions > 0, "the prompt was computed in one go"
    found = outputs[0].prompt_logprobs
    assert found is not None
    assert expected is not None
    assert [entry.token_id for entry in found] == list(scored.prompt[1:])
    assert [entry.logprob for entry in found] == pytest.approx([entry.logprob for entry in expected], abs=1e-4)


def test_the_cache_changes_nothing(bench: Bench) -> None:
    generations = mixed(bench)
    engine = bench.engine()
    expected = alone(bench, generations)
    cold, hot = run(engine, generations), run(engine, generations)
    assert_same(cold, expected)
    assert_same(hot, expected)
    for each in generations:
        assert cold[each.id].cached_tokens == 0
        assert hot[each.id].cached_tokens == (len(each.prompt) - 1) // 16 * 16


def test_no_adapter_sees_another_ones_keys_and_values(bench: Bench) -> None:
    prompt = bench.prompt(50)
    order = [None, "a1", "a2", None, "a1"]
    cached, uncached = bench.engine(), bench.engine(prefix_caching=False)
    hits = []
    for turn, name in enumerate(order):
        adapter = None if name is None else bench.adapter(name)
        each = generation(f"{turn}", prompt, adapter, logprobs=5)
        result = run(cached, [each])[each.id]
        assert_same({each.id: result}, run(uncached, [each]))
        hits.append(result.cached_tokens)
    assert hits == [0, 0, 0, 48, 48]


def test_tenants_share_no_blocks(bench: Bench) -> None:
    prompt = bench.prompt(50)
    engine = bench.engine()
    hits = [
        run(engine, [generation(f"{turn}", prompt, namespace=tenant)])[f"{turn}"].cached_tokens
        for turn, tenant in enumerate(("acme", "globex", "acme", "globex"))
    ]
    assert hits == [0, 0, 48, 48]


def test_constant_eviction_gives_nobody_foreign_tokens(bench: Bench) -> None:
    engine = bench.engine(num_blocks=9, max_num_batched_tokens=32, max_loras=2)
    generations = []
    for index in range(24):
        name = ADAPTERS[index % 3]
        adapter = None if name is None else bench.adapter(name)
        prompt = bench.prompt(20 + index % 7, seed=index % 5)
        generations.append(generation(str(index), prompt, adapter, max_tokens=6))
    results = run(engine, generations)
    for each in generations:
        assert results[each.id].tokens == run(bench.engine(), [each])[each.id].tokens
    stats = engine.stats().scheduler
    assert stats.blocks_used == 0
    assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
    engine.flush_prefix_cache()
    assert engine.stats().scheduler.blocks_free == stats.blocks_total
