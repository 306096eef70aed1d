"""Thousands of short mixed requests: afterwards nothing is held, and no output was disturbed."""

import random
from dataclasses import replace

import pytest
from tests.engine.scheduler_harness import Harness, make_generation, make_limits

from polygraft_engine.types import InvalidRequest

SYSTEM_PROMPTS = [tuple(range(start, start + 24)) for start in (100, 200, 300)]


@pytest.mark.parametrize(
    ("blocks", "requests"),
    [
        pytest.param(200, 5000, id="roomy", marks=pytest.mark.slow),
        pytest.param(14, 1200, id="so small that eviction never ends", marks=pytest.mark.slow),
    ],
)
def test_nothing_is_left_behind(blocks: int, requests: int) -> None:
    rng = random.Random(blocks)
    harness = Harness(
        make_limits(num_blocks=blocks, max_num_seqs=16, max_num_batched_tokens=48, max_loras=3), seconds_per_step=0.05
    )
    submitted = refused = steps = 0
    while submitted < requests or harness.scheduler.has_work:
        while submitted < requests and harness.scheduler.stats().waiting < 12:
            prompt = rng.choice(SYSTEM_PROMPTS)[: rng.randrange(1, 25)] + tuple(
                rng.choices(range(40), k=rng.randrange(8))
            )
            request = make_generation(
                "",
                prompt,
                adapter=rng.choice([None, None, "a1", "a2", "a3", "a4", "a5"]),
                namespace=rng.choice(["acme", "other"]),
                max_tokens=rng.randrange(12),
                ignore_eos=rng.random() < 0.5,
                stop_token_ids=rng.choice([(), (3, 4)]),
            )
            for choice in range(rng.choice([1, 1, 1, 2])):
                harness.add(replace(request, id=f"{submitted}-{choice}", choice=choice))
            submitted += 1
        if rng.random() < 0.3:
            with pytest.raises(InvalidRequest):
                harness.scheduler.add(make_generation(f"refused-{refused}", rng.choice([0, 300])))
            refused += 1
        if rng.random() < 0.3:
            harness.cancel(rng.choice(list(harness.results)))
        harness.step()
        steps += 1
        assert steps < 20 * requests
    harness.assert_undisturbed()
    stats = harness.scheduler.stats()
    assert min(refused, stats.prefix_hit_tokens, stats.slot_evictions, harness.partial_chunks) > 0
    assert {result.finish_reason for result in harness.results.values()} == {"stop", "length", "abort"}
    assert stats.blocks_used == 0
    assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
    harness.assert_idle()
    assert not harness.scheduler.has_work
