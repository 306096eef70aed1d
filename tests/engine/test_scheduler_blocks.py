"""Too few blocks: who waits, who passes, who is preempted, and that everybody gets there."""

import pytest
from tests.engine.scheduler_harness import Harness, make_generation, make_limits

from polygraft_engine.plan import Plan


def ids(plan: Plan) -> list[str]:
    return [chunk.id for chunk in plan.chunks]


@pytest.mark.parametrize(("blocks", "preempts"), [(7, True), (8, True), (9, False), (10, False)])
@pytest.mark.parametrize("adapter", [None, "poet"])
@pytest.mark.parametrize("budget", [16, 64])
def test_a_small_pool_gives_the_output_of_a_large_one(
    blocks: int, preempts: bool, adapter: str | None, budget: int
) -> None:
    limits = make_limits(num_blocks=blocks, block_size=16, max_num_batched_tokens=budget)
    harness = Harness(limits)
    harness.add(*(make_generation(f"{i}", 34, adapter=adapter, choice=i, max_tokens=35) for i in range(3)))
    harness.run()
    assert (harness.scheduler.stats().preemptions > 0) == preempts
    assert [len(result.output) for result in harness.results.values()] == [35, 35, 35]
    harness.assert_undisturbed()
    harness.assert_idle()


def test_a_stop_token_is_found_across_a_preemption() -> None:
    limits = make_limits(num_blocks=7, block_size=16)
    calm = Harness(make_limits())
    prompts = [make_generation(f"{i}", 34, max_tokens=35) for i in range(2)]
    calm.add(*prompts)
    calm.run()
    output = calm.results["1"].output
    stop = next(token for index, token in enumerate(output) if index > 20 and token not in output[:index])
    harness = Harness(limits)
    harness.add(prompts[0], make_generation("1", 34, max_tokens=35, stop_token_ids=(stop,)))
    harness.run()
    assert any("1" in plan.preempted for plan in harness.plans)
    assert (harness.results["1"].finish_reason, harness.results["1"].stop_token) == ("stop", stop)
    harness.assert_undisturbed()


def test_the_youngest_is_preempted_and_the_oldest_never() -> None:
    harness = Harness(make_limits(num_blocks=12))
    harness.add(*(make_generation(f"{i}", 7, max_tokens=30) for i in range(4)))
    harness.run()
    preempted = [id for plan in harness.plans for id in plan.preempted]
    assert preempted[0] == "3"
    assert "0" not in preempted
    assert harness.results["0"].finish_reason == "length"
    harness.assert_undisturbed()


def test_a_preempted_sequence_finds_its_own_blocks_again() -> None:
    harness = Harness(make_limits(num_blocks=16))
    harness.add(make_generation("old", 20, max_tokens=12), make_generation("young", 28, max_tokens=20))
    harness.run()
    (preemption,) = [step for step, plan in enumerate(harness.plans) if plan.preempted]
    resumed = next(chunk for plan in harness.plans[preemption + 1 :] for chunk in plan.chunks if chunk.id == "young")
    assert resumed.start > 0
    assert harness.results["young"].cached_tokens == 0, "it counts what the first admission found"
    harness.assert_undisturbed()


def test_a_preempted_prompt_that_is_scored_is_recomputed_whole() -> None:
    harness = Harness(make_limits(num_blocks=16, max_num_batched_tokens=3))
    harness.add(
        make_generation("old", 22, max_tokens=30), make_generation("scored", 34, prompt_logprobs=0, max_tokens=1)
    )
    harness.run()
    starts = [chunk.start for plan in harness.plans for chunk in plan.chunks if chunk.id == "scored"]
    assert starts.count(0) == 1 + sum("scored" in plan.preempted for plan in harness.plans)
    assert starts.count(0) > 1
    harness.assert_undisturbed()


def test_two_that_fit_alone_but_not_together_both_end() -> None:
    harness = Harness(make_limits(num_blocks=16, max_num_batched_tokens=8))
    harness.add(make_generation("one", 40, max_tokens=20), make_generation("two", 40, max_tokens=20))
    harness.run()
    harness.assert_undisturbed()
    harness.assert_idle()


def test_small_sequences_pass_a_big_one_that_does_not_fit() -> None:
    harness = Harness(make_limits(num_blocks=16), age_limit=100.0)
    harness.add(make_generation("running", 30, max_tokens=20))
    harness.step()
    harness.add(make_generation("big", 40), *(make_generation(f"small-{i}", 3, max_tokens=3) for i in range(10)))
    assert "small-0" in ids(harness.step())
    for _ in range(12):
        harness.step()
    assert all(harness.results[f"small-{i}"].finish_reason == "length" for i in range(10))
    assert harness.results["big"].output == []
    harness.run()
    harness.assert_undisturbed()


def test_nothing_younger_passes_a_big_one_that_is_overdue() -> None:
    harness = Harness(make_limits(num_blocks=24), age_limit=5.0, seconds_per_step=1.0)
    harness.add(make_generation("running", 30, max_tokens=20))
    harness.step()
    harness.add(make_generation("big", 64, max_tokens=4))
    for step in range(60):
        harness.add(make_generation(f"small-{step}", 3, max_tokens=2))
        if "big" in ids(harness.step()):
            break
    started = {id for plan in harness.plans[:-1] for id in ids(plan)} - {"running"}
    assert started == {f"small-{step}" for step in range(5)}, "it is passed until its age limit, and no longer"
    harness.run()
    harness.assert_undisturbed()


def test_an_older_prefill_takes_the_blocks_of_a_younger_decode_planned_in_the_same_step() -> None:
    harness = Harness(make_limits(num_blocks=13, max_num_batched_tokens=3))
    harness.add(make_generation("first", 36))
    for _ in range(12):
        harness.step()
    harness.add(make_generation("big", 40, max_tokens=4), make_generation("young", 3, max_tokens=40))
    harness.step()
    assert "young" in ids(harness.step()), "it passed the big one, which does not fit"
    harness.cancel("first")
    while not harness.step().preempted:
        assert ids(harness.plans[-1]) == ["young", "big"]
    assert harness.plans[-1].preempted == ("young",)
    assert ids(harness.plans[-1]) == ["big"]
    harness.run()
    harness.assert_undisturbed()


def test_a_step_that_preempts_admits_nobody() -> None:
    harness = Harness(make_limits(num_blocks=9, max_num_seqs=2))
    harness.add(make_generation("old", 4, max_tokens=20), make_generation("young", 24), make_generation("small", 1))
    while not harness.step().preempted:
        assert set(ids(harness.plans[-1])) == {"old", "young"}
    assert harness.plans[-1].preempted == ("young",)
    assert ids(harness.plans[-1]) == ["old"], "though there are a seat, budget and blocks for the small one"
    harness.run()
    harness.assert_undisturbed()


def test_cached_blocks_that_a_sequence_would_revive_are_not_counted_as_space_for_it() -> None:
    harness = Harness(make_limits(num_blocks=16))
    prompt = tuple(range(100, 140))
    harness.add(make_generation("first", prompt, max_tokens=1))
    harness.run()
    harness.add(make_generation("running", 22, max_tokens=3))
    harness.step()
    assert (harness.scheduler.stats().blocks_used, harness.scheduler.stats().blocks_cached) == (6, 10)
    harness.add(make_generation("second", prompt + tuple(range(8))))
    harness.step()
    assert harness.scheduler.stats().waiting == 1, (
        "ten blocks of twelve are cached, but they are all the space there is"
    )
    harness.run()
    assert harness.scheduler.stats().preemptions == 0
    assert harness.results["second"].cached_tokens == 40
    harness.assert_undisturbed()


def test_blocks_shared_with_a_running_sequence_cost_nothing() -> None:
    harness = Harness(make_limits(num_blocks=16))
    prompt = tuple(range(100, 142))
    harness.add(make_generation("first", prompt))
    harness.step()
    harness.add(make_generation("second", prompt, choice=1))
    assert ids(harness.step()) == ["first", "second"]
    assert harness.scheduler.stats().blocks_used == 12
    harness.run()
    harness.assert_undisturbed()


def test_the_longest_sequence_a_pool_can_hold_gets_through_a_stream_of_small_ones() -> None:
    harness = Harness(make_limits(num_blocks=16, max_model_len=1000), seconds_per_step=0.1)
    harness.add(make_generation("big", 60, max_tokens=1000))
    for step in range(200):
        harness.add(make_generation(f"small-{step}", 5, max_tokens=5))
        harness.step()
        if harness.results["big"].finish_reason is not None:
            break
    assert len(harness.results["big"].output) == 4
    harness.run()
    harness.assert_undisturbed()


def test_waiting_sequences_hold_no_blocks() -> None:
    harness = Harness(make_limits(num_blocks=16, max_num_batched_tokens=8))
    harness.add(*(make_generation(f"{i}", 50, max_tokens=4) for i in range(5)))
    harness.step()
    stats = harness.scheduler.stats()
    assert (stats.running, stats.waiting, stats.blocks_used) == (1, 4, 2)
    harness.run()
    harness.assert_undisturbed()
