"""Adapter slots: who gets one, who keeps it, and how long another one waits."""

import pytest
from tests.engine.scheduler_harness import Harness, make_generation, make_limits

from polygraft_engine.plan import Plan, SlotLoad
from polygraft_engine.slots import SlotTable


def ids(plan: Plan) -> set[str]:
    return {chunk.id for chunk in plan.chunks}


def test_the_least_recently_used_adapter_that_nobody_pins_leaves() -> None:
    slots = SlotTable(2)
    assert [slots.pin("a"), slots.pin("b")] == [0, 1]
    assert not slots.admits("c")
    slots.unpin("b")
    slots.unpin("a")
    assert slots.pin("c") == 1
    assert slots.resident == ("a", "c")
    assert slots.evictions == 1
    slots.check({"c": 1})


def test_a_slot_is_kept_as_long_as_anybody_pins_it() -> None:
    slots = SlotTable(1)
    slots.pin("a")
    slots.pin("a")
    slots.unpin("a")
    assert not slots.admits("b")
    slots.unpin("a")
    assert slots.admits("b")


def test_the_base_model_takes_no_slot() -> None:
    slots = SlotTable(1)
    slots.pin("a")
    assert slots.admits(None)
    assert slots.pin(None) == -1
    slots.unpin(None)
    slots.check({"a": 1})


def test_a_load_is_asked_for_until_it_is_written() -> None:
    slots = SlotTable(2)
    slot = slots.pin("a")
    load = SlotLoad(slot, "a")
    assert slots.loads_for({slot}) == slots.loads_for({slot}) == (load,)
    assert slots.loads_for({-1}) == ()
    slots.written(load)
    assert slots.loads_for({slot}) == ()
    assert slots.loads == 1


def test_a_dropped_adapter_has_to_be_loaded_again() -> None:
    slots = SlotTable(2)
    load = SlotLoad(slots.pin("a"), "a")
    slots.written(load)
    assert not slots.drop("a"), "it is in use"
    slots.unpin("a")
    assert slots.drop("a")
    assert not slots.drop("a")
    slots.written(load)
    assert slots.resident == ()
    slots.check({})
    assert slots.loads_for({slots.pin("a")}) == (load,)


def test_check_notices_a_pin_without_its_user() -> None:
    slots = SlotTable(2)
    slots.pin("a")
    with pytest.raises(AssertionError, match="pins"):
        slots.check({})


def test_as_many_adapters_as_slots_run_together_with_the_base_model() -> None:
    harness = Harness(make_limits(max_loras=2))
    for id, adapter in (("one", "a1"), ("base", None), ("two", "a2"), ("three", "a3")):
        harness.add(make_generation(id, 5, adapter=adapter))
    plan = harness.step()
    assert [(chunk.id, chunk.slot) for chunk in plan.chunks] == [("base", -1), ("one", 0), ("two", 1)]
    assert plan.loads == (SlotLoad(0, "a1"), SlotLoad(1, "a2"))
    assert harness.step().loads == ()
    harness.run()
    harness.assert_undisturbed()


def test_more_adapters_than_slots_take_turns_with_the_outputs_of_each_alone() -> None:
    harness = Harness(make_limits(max_loras=1))
    for turn in range(3):
        harness.add(*(make_generation(f"{turn}-{i}", (1, 2, 3, 4, 5), adapter=f"a{i}") for i in range(6)))
    harness.run()
    harness.assert_undisturbed()
    stats = harness.scheduler.stats()
    assert stats.slot_loads >= 6
    assert stats.slot_evictions == stats.slot_loads - 1
    assert len({tuple(harness.results[f"0-{i}"].output) for i in range(6)}) == 6


def test_a_resident_adapter_is_not_loaded_again() -> None:
    harness = Harness(make_limits(max_loras=2))
    for i in range(10):
        harness.add(make_generation(f"{i}", 5, adapter=f"a{i % 2}"))
        harness.run()
    assert harness.scheduler.stats().slot_loads == 2
    assert harness.scheduler.stats().resident_adapters == ("a0", "a1")


def test_a_popular_adapter_cannot_keep_another_out_for_ever() -> None:
    harness = Harness(make_limits(max_loras=1), age_limit=5.0, seconds_per_step=1.0)
    harness.add(make_generation("popular-0", 5, adapter="popular", max_tokens=6))
    harness.step()
    harness.add(make_generation("rare", 5, adapter="rare", max_tokens=6))
    waited = passed = 0
    for step in range(1, 100):
        harness.add(make_generation(f"popular-{step}", 5, adapter="popular", max_tokens=6))
        plan = harness.step()
        if "rare" in ids(plan):
            break
        waited += 1
        passed += f"popular-{step}" in ids(plan)
    assert passed == 5, "until its age limit, sequences of the resident adapter pass"
    assert waited <= 5 + 6, "then the slot drains within the longest running output"
    harness.run()
    harness.assert_undisturbed()


def test_the_base_model_goes_on_while_a_slot_drains() -> None:
    harness = Harness(make_limits(max_loras=1), age_limit=0.0)
    harness.add(make_generation("holder", 5, adapter="a1", max_tokens=20))
    harness.step()
    for id, adapter in (("blocked", "a2"), ("resident", "a1"), ("base", None)):
        harness.add(make_generation(id, 5, adapter=adapter))
    assert ids(harness.step()) == {"holder", "base"}
    harness.run()
    harness.assert_undisturbed()


def test_an_adapter_in_use_is_not_dropped_and_one_at_rest_is() -> None:
    harness = Harness(make_limits(max_loras=2))
    harness.add(make_generation("one", 5, adapter="a1"))
    harness.step()
    assert not harness.scheduler.drop_adapter("a1")
    harness.run()
    assert harness.scheduler.drop_adapter("a1")
    harness.scheduler.check()
    harness.add(make_generation("two", 5, adapter="a1"))
    assert harness.step().loads == (SlotLoad(0, "a1"),)
    harness.run()
    harness.assert_undisturbed()
