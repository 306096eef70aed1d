"""Random histories: whatever is added, cancelled, preempted or dropped, nothing leaks, starves or changes an output."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.engine.scheduler_harness import Harness, make_generation, make_limits

from polygraft_engine.types import EngineLimits, Generation

STEM = tuple(range(100, 140))
"""Prompts begin like this for a random length, so that prefixes are shared, in part and in full."""

seen: Counter[str] = Counter()
"""What the histories exercised: without a preemption they would prove nothing about preemptions."""


@st.composite
def limits(draw: st.DrawFn) -> EngineLimits:
    return make_limits(
        max_num_seqs=draw(st.sampled_from([1, 3, 6])),
        max_num_batched_tokens=draw(st.sampled_from([64, 17, 8, 3, 1])),
        block_size=draw(st.sampled_from([1, 2, 4, 8])),
        num_blocks=draw(st.sampled_from([8, 12, 16, 60])),
        max_loras=draw(st.integers(1, 3)),
        max_model_len=draw(st.sampled_from([70, 40, 6])),
        prefix_caching=draw(st.sampled_from([True, True, True, False])),
    )


@st.composite
def generations(draw: st.DrawFn, context: int) -> Generation:
    """A request that these limits accept; its id is filled in later."""
    length = draw(st.integers(1, min(context - 1, 50)) | st.integers(1, min(context - 1, 8)))
    shared = min(len(STEM), draw(st.sampled_from([0, length // 2, length])))
    own = draw(st.tuples(*[st.integers(0, 1)] * (length - shared)))
    max_tokens = draw(st.sampled_from([0, 1, 5, 20, 30]))
    return make_generation(
        "",
        STEM[:shared] + own,
        adapter=draw(st.sampled_from([None, "a1", "a2", "a3", "a4"])),
        namespace=draw(st.sampled_from(["acme", "other"])),
        choice=draw(st.integers(0, 1)),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        ignore_eos=draw(st.booleans()),
        stop_token_ids=draw(st.sampled_from([(), (), (1, 2, 3)])),
        prompt_logprobs=draw(st.sampled_from([None, None, 0])),
    )


class History(RuleBasedStateMachine):
    """The harness checks every step; after the last one everything is finished and measured."""

    def __init__(self) -> None:
        super().__init__()
        self.harness = Harness(make_limits())
        self.live: list[str] = []

    @initialize(limits=limits(), age_limit=st.sampled_from([0.0, 3.0, 1000.0]))
    def begin(self, limits: EngineLimits, age_limit: float) -> None:
        self.harness = Harness(limits, age_limit=age_limit, seconds_per_step=1.0)

    @rule(data=st.data(), copies=st.integers(1, 3))
    def add(self, data: st.DataObject, copies: int) -> None:
        self._add(*[data.draw(generations(self.harness.limits.max_context))] * copies)

    @rule(count=st.integers(2, 6), adapter=st.sampled_from([None, "a1"]))
    def add_a_crowd_that_outgrows_the_pool(self, count: int, adapter: str | None) -> None:
        self._add(*(make_generation("", (i, i, i, i), adapter=adapter, max_tokens=40) for i in range(count)))

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.harness.step()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(self.live))
        self.live.remove(id)
        was_live = self.harness.results[id].finish_reason is None
        assert self.harness.cancel(id) == was_live
        seen["cancelled"] += was_live

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel_between_plan_and_commit(self, data: st.DataObject) -> None:
        scheduler = self.harness.scheduler
        plan = scheduler.schedule()
        sampled = self.harness.model.forward(plan)
        self.cancel(data)
        self.harness.record(scheduler.commit(plan, sampled))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fail_a_step(self, data: st.DataObject) -> None:
        plan = self.harness.scheduler.schedule()
        ids = [chunk.id for chunk in plan.chunks]
        victims = data.draw(st.lists(st.sampled_from(ids), unique=True)) if ids else []
        self.harness.record(self.harness.scheduler.fail(victims, "broken"))
        seen["failed"] += len(victims)

    @rule(digest=st.sampled_from(["a1", "a2", "a3", "a4"]))
    def drop_adapter(self, digest: str) -> None:
        self.harness.scheduler.drop_adapter(digest)

    @rule()
    def flush(self) -> None:
        self.harness.scheduler.flush_prefix_cache()

    @invariant()
    def holds(self) -> None:
        self.harness.scheduler.check()

    def _add(self, *requests: Generation) -> None:
        for request in requests:
            id = str(len(self.harness.results))
            self.harness.add(replace(request, id=id))
            self.live.append(id)

    def teardown(self) -> None:
        tokens = sum(len(g.prompt) + g.params.max_tokens for g in self.harness.generations.values())
        # Each step computes at least one token of the oldest, and preemption repeats at most what was computed.
        self.harness.run(max_steps=100 + 10 * tokens)
        for id, result in self.harness.results.items():
            if result.finish_reason != "error":
                self.harness.assert_undisturbed(id)
        self.harness.assert_idle()
        stats = self.harness.scheduler.stats()
        seen["preempted"] += stats.preemptions
        seen["hit"] += stats.prefix_hit_tokens
        seen["evicted adapters"] += stats.slot_evictions
        seen["chunks"] += self.harness.partial_chunks


@pytest.mark.parametrize("histories", [20, pytest.param(400, marks=pytest.mark.slow)])
def test_no_history_leaks_starves_or_changes_an_output(histories: int) -> None:
    seen.clear()
    run_state_machine_as_test(
        History,
        settings=settings(
            max_examples=histories, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
        ),
    )
    events = ("cancelled", "failed", "preempted", "hit", "evicted adapters", "chunks")
    assert [event for event in events if seen[event] == 0] == []


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_batch_chunks_preemption_and_cache_do_not_show_in_the_output(data: st.DataObject) -> None:
    first, second = data.draw(limits()), data.draw(limits())
    context = min(first.max_context, second.max_context)
    first, second = replace(first, max_model_len=context), replace(second, max_model_len=context)
    requests = data.draw(st.lists(generations(context), min_size=1, max_size=8))
    requests = [replace(request, id=str(index)) for index, request in enumerate(requests)]
    outputs = []
    for bounds, order in ((first, requests), (second, requests[::-1])):
        harness = Harness(bounds)
        harness.add(*order)
        harness.run()
        harness.assert_idle()
        outputs.append({id: result.output for id, result in harness.results.items()})
    assert outputs[0] == outputs[1]
