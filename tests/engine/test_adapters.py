"""Adapters in the batch: slots, base rows beside them, one pass for all, and adapters that cannot be loaded."""

from __future__ import annotations

import pytest
import torch
from tests.engine.bench import Bench, Result, generation, run
from torch import Tensor

from polygraft_adapters.weights import AdapterWeights
from polygraft_engine.adapter_source import DictSource
from polygraft_engine.types import EngineError, InvalidRequest
from polygraft_kernels import reference
from polygraft_kernels.api import LoraBank, LoraGroups
from polygraft_kernels.reference import ReferenceBackend

NINE = [f"b{index}" for index in range(9)]


class CountingBackend(ReferenceBackend):
    """The reference, which counts its LoRA calls and the groups each one served."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.groups_per_call: list[int] = []

    def lora(self, y: Tensor, x: Tensor, bank: LoraBank, groups: LoraGroups) -> None:
        self.groups_per_call.append(len(groups.slots))
        super().lora(y, x, bank, groups)


def isolated(bench: Bench, name: str | None, prompt: tuple[int, ...]) -> Result:
    adapter = None if name is None else bench.adapter(name)
    return run(bench.engine(), [generation("only", prompt, adapter, logprobs=5)])["only"]


def test_sixteen_rows_on_nine_adapters_are_one_pass_and_one_lora_call_per_operation_and_layer(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = CountingBackend(torch.device("cpu"))
    monkeypatch.setattr(reference, "create", lambda device, dtype: backend)
    adapters = [bench.adapter(name) for name in NINE]
    engine = bench.engine(max_loras=9)
    for row in range(16):
        adapter = adapters[row % 10] if row % 10 < 9 else None
        engine.add(generation(str(row), bench.prompt(7, seed=row), adapter))
    for passes in (1, 2):
        backend.groups_per_call.clear()
        outputs = engine.step()
        assert engine.stats().forward_passes == passes
        assert len(outputs) == 16
        operations = 4  # qkv, o, gate and up, down
        assert backend.groups_per_call == [9] * operations * bench.spec.layers


def test_a_base_row_beside_adapters_equals_the_base_alone(bench: Bench) -> None:
    # To rounding here, as plain torch sums in an order that depends on the number of rows; test_exactness has the bits.
    prompt = bench.prompt(30)
    beside = [
        generation(name, bench.prompt(30, seed=index + 1), bench.adapter(name)) for index, name in enumerate(NINE[:8])
    ]
    result = run(bench.engine(), [*beside, generation("base", prompt, logprobs=5)])["base"]
    expected = run(bench.engine(), [generation("base", prompt, logprobs=5)])["base"]
    assert result.tokens == expected.tokens
    for entry, other in zip(result.logprobs, expected.logprobs, strict=True):
        assert entry.logprob == pytest.approx(other.logprob, abs=1e-5)
        assert [token for token, _ in entry.top] == [token for token, _ in other.top]


def test_base_rows_never_touch_a_bank(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = CountingBackend(torch.device("cpu"))
    monkeypatch.setattr(reference, "create", lambda device, dtype: backend)
    engine = bench.engine(max_loras=1)
    run(engine, [generation("a", bench.prompt(9), bench.adapter("a1"))])
    backend.groups_per_call.clear()
    run(engine, [generation("base", bench.prompt(9))])
    assert backend.groups_per_call == []


def test_an_adapter_that_left_its_slot_comes_back_unchanged(bench: Bench) -> None:
    before = {key: (pair.a.clone(), pair.b.clone()) for key, pair in bench.weights("a1").pairs.items()}
    engine = bench.engine(max_loras=1, prefix_caching=False)
    prompt = bench.prompt(25)
    for turn, name in enumerate(("a1", "a2", "a1")):
        result = run(engine, [generation(f"{turn}", prompt, bench.adapter(name), logprobs=5)])[f"{turn}"]
        assert result == isolated(bench, name, prompt)
    assert engine.stats().scheduler.slot_evictions == 2
    for key, pair in bench.weights("a1").pairs.items():
        assert torch.equal(pair.a, before[key][0])
        assert torch.equal(pair.b, before[key][1])


def test_nothing_of_the_previous_tenant_stays_in_a_slot(bench: Bench) -> None:
    # one that adds to every module leaves; one that adds to two takes its slot
    everywhere = next(name for name in NINE if len(bench.weights(name).info.targets) == 7)
    sparse = next(name for name in NINE if len(bench.weights(name).info.targets) == 2)
    engine = bench.engine(max_loras=1)
    prompt = bench.prompt(25)
    run(engine, [generation("first", prompt, bench.adapter(everywhere))])
    result = run(engine, [generation("second", prompt, bench.adapter(sparse), logprobs=5)])["second"]
    assert result == isolated(bench, sparse, prompt)


def test_more_adapters_are_registered_than_a_step_mixes(bench: Bench) -> None:
    names = NINE[:6]
    prompt = bench.prompt(12)
    expected = {name: isolated(bench, name, prompt).tokens for name in names}
    engine = bench.engine(max_loras=1)
    generations = [generation(f"{name} {turn}", prompt, bench.adapter(name)) for turn in range(3) for name in names]
    results = run(engine, generations)
    for each in generations:
        assert results[each.id].tokens == expected[each.id.split()[0]]


def test_the_base_takes_no_slot(bench: Bench) -> None:
    engine = bench.engine(max_loras=2)
    for name in ("a1", "a2", None):
        engine.add(generation(str(name), bench.prompt(8), None if name is None else bench.adapter(name)))
    assert {output.id for output in engine.step()} == {"a1", "a2", "None"}


@pytest.mark.slow
def test_an_adapter_waits_a_bounded_time_behind_a_popular_one(bench: Bench) -> None:
    engine = bench.engine(max_loras=1)
    engine.add(generation("popular 0", bench.prompt(8), bench.adapter("a1")))
    engine.step()
    engine.add(generation("rare", bench.prompt(8), bench.adapter("a2")))
    served, sent = False, 0
    while not served:
        sent += 1
        assert sent < 20000, "the rare adapter starves"
        engine.add(generation(f"popular {sent}", bench.prompt(8), bench.adapter("a1")))
        served = any(output.id == "rare" for output in engine.step())


def test_an_unknown_adapter_is_refused_when_it_is_asked_for(bench: Bench) -> None:
    engine = bench.engine()
    with pytest.raises(InvalidRequest, match="sha256:unknown"):
        engine.add(generation("x", bench.prompt(8), "sha256:unknown"))
    assert not engine.has_work


def test_an_adapter_above_the_largest_rank_is_refused_with_both_numbers(bench: Bench) -> None:
    name = next(name for name in NINE if bench.weights(name).info.rank == 16)
    engine = bench.engine(max_lora_rank=8)
    with pytest.raises(InvalidRequest, match=r"rank 16.* up to 8"):
        engine.add(generation("x", bench.prompt(8), bench.adapter(name)))


class VanishingSource(DictSource):
    """Loses one adapter while `broken` is set."""

    def __init__(self, source: DictSource, victim: str) -> None:
        self._source = source
        self._victim = victim
        self.broken = False

    def get(self, digest: str) -> AdapterWeights:
        if self.broken and digest == self._victim:
            raise EngineError("the disk is gone")
        return self._source.get(digest)


def test_an_adapter_that_cannot_be_loaded_fails_its_own_sequences_only(bench: Bench) -> None:
    victim = bench.adapter("a1")
    other = bench.adapter("a2")
    source = VanishingSource(bench.source(), victim)
    engine = bench.engine(source=source)
    prompt = bench.prompt(20)
    for id, adapter in (("broken", victim), ("other", other), ("base", None)):
        engine.add(generation(id, prompt, adapter))
    source.broken = True
    results: dict[str, list[int]] = {"broken": [], "other": [], "base": []}
    errors = {}
    while engine.has_work:
        for output in engine.step():
            results[output.id].extend(output.token_ids)
            if output.error is not None:
                errors[output.id] = output.error
        engine.check()
    assert errors.keys() == {"broken"}
    assert "the disk is gone" in errors["broken"]
    assert results["other"] == isolated(bench, "a2", prompt).tokens
    assert results["base"] == isolated(bench, None, prompt).tokens
    source.broken = False
    again = run(engine, [generation("again", prompt, victim)])["again"]
    assert again.tokens == isolated(bench, "a1", prompt).tokens


def test_an_adapter_in_its_slot_is_not_written_again(bench: Bench) -> None:
    digest = bench.adapter("a1")
    engine = bench.engine()
    run(engine, [generation("one", bench.prompt(8), digest)])
    run(engine, [generation("two", bench.prompt(8), digest)])
    assert engine.stats().scheduler.slot_loads == 1
