"""Prefix caching: who shares what, and who never does."""

import pytest
from tests.engine.scheduler_harness import Harness, make_generation, make_limits

PROMPT = tuple(range(100, 122))
"""Five full blocks of four and two tokens."""


def run(harness: Harness, id: str, prompt: tuple[int, ...] = PROMPT, **fields: object) -> int:
    """Computes one sequence to its end and returns its cached tokens."""
    harness.add(make_generation(id, prompt, **fields))  # type: ignore[arg-type]
    harness.run()
    harness.assert_undisturbed(id)
    return harness.results[id].cached_tokens


def test_the_same_prompt_again_computes_only_what_is_not_a_full_block() -> None:
    harness = Harness(make_limits())
    assert run(harness, "first") == 0
    assert run(harness, "second") == 20
    assert harness.plans[-8].chunks[0].start == 20
    stats = harness.scheduler.stats()
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (44, 20)
    harness.assert_idle()


def test_at_least_one_prompt_token_is_computed() -> None:
    harness = Harness(make_limits())
    assert run(harness, "first", PROMPT[:20]) == 0
    assert run(harness, "second", PROMPT[:20]) == 16


def test_a_conversation_continues_from_its_own_output() -> None:
    harness = Harness(make_limits())
    run(harness, "first", max_tokens=10)
    continued = PROMPT + tuple(harness.results["first"].output)
    # The last output token was never computed: 31 tokens are 7 full blocks.
    assert run(harness, "second", (*continued, 1, 2, 3)) == 28


def test_adapters_and_the_base_model_never_share() -> None:
    harness = Harness(make_limits())
    cached = [run(harness, f"{i}", adapter=adapter) for i, adapter in enumerate((None, "a1", "a2", None, "a1", "a2"))]
    assert cached == [0, 0, 0, 20, 20, 20]


def test_namespaces_never_share_but_each_shares_with_itself() -> None:
    harness = Harness(make_limits())
    cached = [run(harness, f"{i}", namespace=tenant) for i, tenant in enumerate(("acme", "other", "acme", "other"))]
    assert cached == [0, 0, 20, 20]


def test_a_namespace_cannot_pose_as_an_adapter() -> None:
    harness = Harness(make_limits())
    assert run(harness, "first", namespace="a", adapter="bc") == 0
    assert run(harness, "second", namespace="ab", adapter="c") == 0


def test_without_prefix_caching_nothing_is_kept() -> None:
    harness = Harness(make_limits(prefix_caching=False))
    assert [run(harness, "first"), run(harness, "second")] == [0, 0]
    stats = harness.scheduler.stats()
    assert (stats.blocks_cached, stats.blocks_free, stats.prefix_query_tokens) == (0, 256, 0)


def test_scoring_the_prompt_computes_all_of_it_and_lets_others_reuse_it() -> None:
    harness = Harness(make_limits())
    assert run(harness, "first") == 0
    assert run(harness, "scored", prompt_logprobs=0) == 0
    harness.scheduler.flush_prefix_cache()
    assert run(harness, "scored again", prompt_logprobs=0) == 0
    assert run(harness, "last") == 20


def test_a_flush_forgets_also_what_runs() -> None:
    harness = Harness(make_limits())
    harness.add(make_generation("running", PROMPT, max_tokens=30))
    harness.step()
    harness.scheduler.flush_prefix_cache()
    harness.scheduler.check()
    harness.add(make_generation("later", PROMPT))
    harness.run()
    assert harness.results["later"].cached_tokens == 0
    harness.assert_undisturbed()


def test_two_that_compute_the_same_blocks_at_once_keep_one() -> None:
    harness = Harness(make_limits())
    harness.add(*(make_generation(str(i), PROMPT, prompt_logprobs=0) for i in range(2)))
    harness.run()
    harness.assert_undisturbed()
    # Five blocks of the prompt, and two that output fills; the private copies are free.
    assert harness.scheduler.stats().blocks_cached == 7
    assert harness.scheduler.stats().blocks_used == 0


@pytest.mark.parametrize("budget", [8, 64])
def test_many_equal_prompts_compute_their_prefix_once(budget: int) -> None:
    harness = Harness(make_limits(max_num_seqs=16, max_num_batched_tokens=budget))
    harness.add(*(make_generation(str(i), PROMPT, choice=i, max_tokens=12) for i in range(16)))
    harness.run()
    harness.assert_undisturbed()
    prompt_tokens = sum(
        min(chunk.count, 22 - chunk.start) for plan in harness.plans for chunk in plan.chunks if chunk.start < 22
    )
    assert prompt_tokens == 22 + 15 * 2
    assert [harness.results[str(i)].cached_tokens for i in range(16)] == [0] + [20] * 15


def test_who_waits_for_a_prefix_lets_others_pass() -> None:
    harness = Harness(make_limits(max_num_batched_tokens=16))
    harness.add(make_generation("leader", PROMPT), make_generation("follower", PROMPT), make_generation("other", 3))
    assert [chunk.id for chunk in harness.step().chunks] == ["leader"]
    assert [chunk.id for chunk in harness.step().chunks] == ["leader", "other"]
    assert [(chunk.id, chunk.start) for chunk in harness.step().chunks if chunk.id == "follower"] == [("follower", 20)]
    harness.run()
    harness.assert_undisturbed()


def test_a_follower_goes_on_when_its_leader_is_cancelled() -> None:
    harness = Harness(make_limits(max_num_batched_tokens=8))
    harness.add(make_generation("leader", PROMPT), make_generation("follower", PROMPT))
    harness.step()
    harness.cancel("leader")
    assert [(chunk.id, chunk.start) for chunk in harness.step().chunks] == [("follower", 8)]
    harness.run()
    harness.assert_undisturbed("follower")
