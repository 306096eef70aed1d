"""Native kernels: the same request yields the same bits, whatever else happens in the engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.engine.bench import ADAPTERS, Bench, Result, mixed, run

from polygraft_kernels.registry import choose


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def native(request: pytest.FixtureRequest, make_model: Callable[..., Path]) -> tuple[Bench, dict[str, object]]:
    """A tiny model and the options that make engines of it on native kernels."""
    bench = Bench(make_model(dtype=request.param))
    for name in ADAPTERS[1:]:
        if name is not None:
            bench.adapter(name)
    return bench, {"kernels": "native", "dtype": request.param}


def alone(native: tuple[Bench, dict[str, object]], **params: object) -> dict[str, Result]:
    bench, options = native
    return {
        each.id: run(bench.engine(prefix_caching=False, **options), [each])[each.id] for each in mixed(bench, **params)
    }


def assert_same_bits(results: dict[str, Result], expected: dict[str, Result]) -> None:
    assert {id: (each.tokens, each.logprobs) for id, each in results.items()} == {
        id: (each.tokens, each.logprobs) for id, each in expected.items()
    }


def test_neighbours_chunks_and_the_cache_change_no_bit(native: tuple[Bench, dict[str, object]]) -> None:
    bench, options = native
    expected = alone(native)
    engine = bench.engine(max_num_batched_tokens=23, **options)
    assert_same_bits(run(engine, mixed(bench)), expected)
    hot = run(engine, mixed(bench))
    assert all(result.cached_tokens > 0 for result in hot.values())
    assert_same_bits(hot, expected)


def test_preemption_changes_no_bit(native: tuple[Bench, dict[str, object]]) -> None:
    bench, options = native
    engine = bench.engine(num_blocks=10, prefix_caching=False, **options)
    results = run(engine, mixed(bench, max_tokens=30))
    assert engine.stats().scheduler.preemptions > 0
    assert_same_bits(results, alone(native, max_tokens=30))


def test_a_slots_next_tenant_changes_no_bit(native: tuple[Bench, dict[str, object]]) -> None:
    bench, options = native
    engine = bench.engine(max_loras=1, prefix_caching=False, **options)
    assert_same_bits(run(engine, mixed(bench)), alone(native))
    assert engine.stats().scheduler.slot_evictions == 3


def test_the_instruction_set_is_part_of_the_numerics(native: tuple[Bench, dict[str, object]]) -> None:
    bench, options = native
    backend = choose("native", torch.device("cpu"), torch.float32).backend
    assert bench.engine(**options).info.numerics_id.startswith(f"native-{backend.isa}/")  # type: ignore[attr-defined]
