"""One sequence's way: admission, chunks, decode, its end, and errors."""

from collections.abc import Callable

import pytest
from tests.engine.scheduler_harness import EOS, Harness, make_generation, make_limits

from polygraft_engine.plan import Plan, Sampled
from polygraft_engine.scheduler import Scheduler
from polygraft_engine.types import EngineError, InvalidRequest, TokenLogprob


def commit(scheduler: Scheduler, plan: Plan, *tokens: int) -> None:
    scheduler.commit(plan, [Sampled(token, None) for token in tokens])


def test_nothing_to_do_is_an_empty_plan() -> None:
    scheduler = Scheduler(make_limits(), frozenset({EOS}))
    assert not scheduler.has_work
    plan = scheduler.schedule()
    assert plan == Plan((), (), ())
    assert scheduler.commit(plan, []) == []


def test_a_long_prompt_is_computed_in_chunks_and_only_the_last_one_samples() -> None:
    harness = Harness(make_limits(max_num_batched_tokens=16))
    harness.add(make_generation("a", 40, max_tokens=3))
    chunks = [harness.step().chunks[0] for _ in range(5)]
    assert [(chunk.start, chunk.count, chunk.samples) for chunk in chunks] == [
        (0, 16, False),
        (16, 16, False),
        (32, 8, True),
        (40, 1, True),
        (41, 1, True),
    ]
    harness.assert_undisturbed()
    harness.assert_idle()


def test_decodes_go_first_and_prefills_share_the_rest_of_the_budget_by_age() -> None:
    harness = Harness(make_limits(max_num_batched_tokens=16))
    harness.add(make_generation("old", 4, max_tokens=20))
    harness.step()
    harness.add(make_generation("middle", 12), make_generation("young", 30))
    assert [(chunk.id, chunk.count) for chunk in harness.step().chunks] == [("old", 1), ("middle", 12), ("young", 3)]
    assert [(chunk.id, chunk.count) for chunk in harness.step().chunks] == [("old", 1), ("middle", 1), ("young", 14)]
    harness.run()
    harness.assert_undisturbed()


def test_at_most_max_num_seqs_run_at_once() -> None:
    harness = Harness(make_limits(max_num_seqs=3))
    harness.add(*(make_generation(str(i), 3) for i in range(8)))
    assert [chunk.id for chunk in harness.step().chunks] == ["0", "1", "2"]
    assert harness.scheduler.stats().waiting == 5
    harness.run()
    harness.assert_undisturbed()


def test_an_old_prefill_progresses_however_many_decodes_there_are() -> None:
    harness = Harness(make_limits(max_num_seqs=8, max_num_batched_tokens=4))
    harness.add(
        make_generation("old", 60, max_tokens=1), *(make_generation(str(i), 1, max_tokens=60) for i in range(8))
    )
    for _ in range(60):
        harness.step()
        if harness.results["old"].finish_reason is not None:
            break
    assert harness.results["old"].finish_reason == "length"
    harness.run()
    harness.assert_undisturbed()


def test_the_block_table_of_a_decode_is_rebuilt_only_when_it_grows() -> None:
    harness = Harness(make_limits(block_size=8))
    harness.add(make_generation("a", 9, max_tokens=16))
    tables = [harness.step().chunks[0].blocks for _ in range(16)]
    assert len({id(table) for table in tables}) == 2
    assert [len(table) for table in tables] == [2] * 8 + [3] * 8


@pytest.mark.parametrize(
    ("token", "params", "expected"),
    [
        (EOS, {"ignore_eos": False}, ("stop", EOS)),
        (EOS, {"ignore_eos": True}, (None, None)),
        (7, {"stop_token_ids": (7, 9)}, ("stop", 7)),
        (8, {"stop_token_ids": (7, 9)}, (None, None)),
        (7, {"stop_token_ids": (7,), "min_tokens": 2}, (None, None)),
        (EOS, {"ignore_eos": False, "min_tokens": 1}, ("stop", EOS)),
        (8, {"max_tokens": 1}, ("length", None)),
        (7, {"stop_token_ids": (7,), "max_tokens": 1}, ("stop", 7)),
    ],
)
def test_the_first_token_ends_the_output(
    token: int, params: dict[str, object], expected: tuple[str | None, int | None]
) -> None:
    scheduler = Scheduler(make_limits(), frozenset({EOS}))
    scheduler.add(make_generation("a", 3, **params))
    (output,) = scheduler.commit(scheduler.schedule(), [Sampled(token, None)])
    assert (output.finish_reason, output.stop_token) == expected
    assert output.token_ids == (token,)
    assert scheduler.has_work == (expected[0] is None)
    scheduler.check()


def test_min_tokens_counts_the_token_that_stops() -> None:
    scheduler = Scheduler(make_limits(), frozenset({EOS}))
    scheduler.add(make_generation("a", 3, stop_token_ids=(7,), min_tokens=3))
    outputs = [scheduler.commit(scheduler.schedule(), [Sampled(7, None)])[0] for _ in range(3)]
    assert [output.finish_reason for output in outputs] == [None, None, "stop"]


def test_without_tokens_to_generate_the_prompt_is_computed_and_nothing_sampled() -> None:
    harness = Harness(make_limits(max_num_batched_tokens=8))
    harness.add(make_generation("a", 20, max_tokens=0))
    plans = [harness.step() for _ in range(3)]
    assert [chunk.count for plan in plans for chunk in plan.chunks] == [8, 8, 4]
    assert not any(chunk.samples for plan in plans for chunk in plan.chunks)
    assert (harness.results["a"].output, harness.results["a"].finish_reason) == ([], "length")
    harness.assert_idle()


def test_a_logprob_is_passed_on_with_its_token() -> None:
    scheduler = Scheduler(make_limits(), frozenset({EOS}))
    scheduler.add(make_generation("a", 3, logprobs=0))
    logprob = TokenLogprob(7, -0.5)
    (output,) = scheduler.commit(scheduler.schedule(), [Sampled(7, logprob)])
    assert output.logprobs == (logprob,)


@pytest.mark.parametrize(("model_length", "blocks"), [(32, 256), (256, 8)], ids=["model", "pool"])
def test_a_prompt_one_short_of_the_context_generates_one_token(model_length: int, blocks: int) -> None:
    limits = make_limits(max_model_len=model_length, num_blocks=blocks)
    harness = Harness(limits)
    harness.add(make_generation("a", 31, max_tokens=100))
    harness.run()
    assert len(harness.results["a"].output) == 1
    assert harness.results["a"].finish_reason == "length"
    harness.assert_undisturbed()


@pytest.mark.parametrize("length", [32, 33, 1000])
@pytest.mark.parametrize(("model_length", "blocks"), [(32, 256), (256, 8)], ids=["model", "pool"])
def test_a_prompt_that_fills_the_context_is_refused_with_the_numbers(
    model_length: int, blocks: int, length: int
) -> None:
    scheduler = Scheduler(make_limits(max_model_len=model_length, num_blocks=blocks), frozenset({EOS}))
    with pytest.raises(InvalidRequest) as refusal:
        scheduler.add(make_generation("a", length, max_tokens=17))
    assert refusal.value.code == "context_length_exceeded"
    message = str(refusal.value)
    assert all(number in message for number in ("32", str(length), "17"))
    assert "None" not in message
    assert not scheduler.has_work
    scheduler.check()


def test_output_that_reaches_the_end_of_the_pool_ends_with_length() -> None:
    harness = Harness(make_limits(num_blocks=5, max_model_len=1000))
    harness.add(make_generation("a", 6, max_tokens=1000))
    harness.run()
    assert len(harness.results["a"].output) == 14
    assert harness.results["a"].finish_reason == "length"
    harness.assert_undisturbed()
    harness.assert_idle()


def test_an_empty_prompt_is_refused() -> None:
    scheduler = Scheduler(make_limits(), frozenset({EOS}))
    with pytest.raises(InvalidRequest, match="empty"):
        scheduler.add(make_generation("a", ()))


def test_an_adapter_is_refused_where_none_is_served() -> None:
    scheduler = Scheduler(make_limits(max_loras=0), frozenset({EOS}))
    with pytest.raises(InvalidRequest, match="max_loras"):
        scheduler.add(make_generation("a", 3, adapter="poet"))


def test_one_id_cannot_live_twice_but_may_come_back() -> None:
    harness = Harness(make_limits())
    harness.add(make_generation("a", 3))
    with pytest.raises(AssertionError, match="already live"):
        harness.scheduler.add(make_generation("a", 3))
    harness.run()
    harness.add(make_generation("a", 3))
    harness.run()
    harness.assert_undisturbed()


@pytest.mark.parametrize(
    ("changes", "numbers"),
    [
        ({"num_blocks": 0}, ["num_blocks", "0"]),
        ({"max_num_seqs": 0}, ["max_num_seqs", "0"]),
        ({"max_num_batched_tokens": -1}, ["max_num_batched_tokens", "-1"]),
        ({"block_size": 0}, ["block_size", "0"]),
        ({"max_loras": -2}, ["max_loras", "-2"]),
        ({"max_model_len": 1}, ["max_model_len 1", "256 blocks"]),
    ],
)
def test_limits_under_which_nothing_runs_are_refused_with_their_numbers(
    changes: dict[str, int], numbers: list[str]
) -> None:
    with pytest.raises(EngineError) as refusal:
        Scheduler(make_limits(**changes), frozenset({EOS}))
    assert all(number in str(refusal.value) for number in numbers)


def waiting(harness: Harness) -> None:
    harness.add(make_generation("victim", 30))


def prefilling(harness: Harness) -> None:
    harness.add(make_generation("victim", 30))
    harness.step()


def decoding(harness: Harness) -> None:
    harness.add(make_generation("victim", 3))
    harness.step()


@pytest.mark.parametrize("phase", [waiting, prefilling, decoding])
def test_cancel_frees_everything_at_once_and_only_once(phase: Callable[[Harness], None]) -> None:
    harness = Harness(make_limits(max_num_batched_tokens=16, max_loras=1))
    harness.add(make_generation("other", 3, adapter="poet"))
    harness.step()
    before = harness.scheduler.stats()
    phase(harness)
    assert harness.cancel("victim")
    assert not harness.cancel("victim")
    assert not harness.cancel("unheard of")
    after = harness.scheduler.stats()
    assert (after.running, after.waiting, after.blocks_used) == (1, 0, before.blocks_used)
    harness.run()
    harness.assert_undisturbed()
    harness.assert_idle()


def test_what_is_cancelled_during_a_step_is_left_out_of_its_outputs() -> None:
    scheduler = Scheduler(make_limits(), frozenset({EOS}))
    for id in ("a", "b", "c"):
        scheduler.add(make_generation(id, 3))
    plan = scheduler.schedule()
    scheduler.cancel("b")
    scheduler.cancel("c")
    scheduler.add(make_generation("c", 5))
    outputs = scheduler.commit(plan, [Sampled(token, None) for token in (5, 6, 7)])
    assert [(output.id, output.token_ids) for output in outputs] == [("a", (5,))]
    scheduler.check()
    assert [(chunk.id, chunk.start, chunk.count) for chunk in scheduler.schedule().chunks] == [("a", 3, 1), ("c", 0, 5)]


def test_a_step_that_failed_ends_its_sequences_with_the_error() -> None:
    harness = Harness(make_limits(max_num_seqs=2, max_loras=1))
    harness.add(*(make_generation(str(i), 3, adapter="poet") for i in range(3)))
    plan = harness.scheduler.schedule()
    outputs = harness.scheduler.fail([*(chunk.id for chunk in plan.chunks), "unheard of"], "no memory")
    harness.scheduler.check()
    assert [(output.id, output.finish_reason, output.error) for output in outputs] == [
        ("0", "error", "no memory"),
        ("1", "error", "no memory"),
    ]
    assert harness.step().loads, "nobody said that the adapter had been written"
    harness.run()
    harness.assert_undisturbed("2")
    harness.assert_idle()


def test_only_the_last_plan_is_committed_and_once() -> None:
    scheduler = Scheduler(make_limits(), frozenset({EOS}))
    scheduler.add(make_generation("a", 3))
    stale = scheduler.schedule()
    plan = scheduler.schedule()
    assert plan.chunks == stale.chunks
    with pytest.raises(AssertionError, match="last plan"):
        commit(scheduler, stale, 5)
    with pytest.raises(AssertionError, match="one sampled token"):
        commit(scheduler, plan)
    commit(scheduler, plan, 5)
    with pytest.raises(AssertionError, match="last plan"):
        commit(scheduler, plan, 5)


def test_choices_of_one_prompt_differ_in_their_output_and_not_with_their_company() -> None:
    prompt = tuple(range(100, 121))
    choices = [make_generation(f"choice-{i}", prompt, choice=i, seed=7, max_tokens=20) for i in range(4)]
    alone, crowd = Harness(make_limits()), Harness(make_limits(max_num_seqs=16))
    alone.add(*choices)
    crowd.add(*(make_generation(f"other-{i}", 5 + i, adapter=None if i % 2 else "poet") for i in range(30)))
    crowd.add(*choices)
    for harness in (alone, crowd):
        harness.run()
        harness.assert_undisturbed()
    outputs = [tuple(alone.results[choice.id].output) for choice in choices]
    assert len(set(outputs)) == 4
    assert outputs == [tuple(crowd.results[choice.id].output) for choice in choices]
