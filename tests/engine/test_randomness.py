"""The uniform numbers."""

from __future__ import annotations

import numpy as np

from polygraft_engine.randomness import uniform

KNOWN = [0.13870936632156372, 0.6093944907188416, 0.9835571050643921, 0.10007888078689575, 0.9844383597373962]


def test_it_is_a_pure_function() -> None:
    assert uniform(7, 1, 2) == uniform(7, 1, 2)


def test_the_values_never_change() -> None:
    # A resumed request must draw what it would have drawn on the release that started it.
    assert [uniform(0, 0, 0), uniform(7, 0, 0), uniform(7, 1, 0), uniform(7, 0, 1), uniform(-1, 0, 0)] == KNOWN


def test_every_value_is_a_float32_below_one() -> None:
    values = [uniform(seed, 0, position) for seed in range(100) for position in range(100)]
    assert all(0.0 <= value < 1.0 for value in values)
    assert all(float(np.float32(value)) == value for value in values)


def test_seeds_choices_and_positions_all_matter_and_are_not_interchangeable() -> None:
    grid = {uniform(seed, choice, position) for seed in range(8) for choice in range(8) for position in range(8)}
    assert len(grid) == 512


def test_any_int64_is_a_seed() -> None:
    extremes = {uniform(seed, 0, 0) for seed in (-(2**63), -1, 0, 2**63 - 1)}
    assert len(extremes) == 4


def test_the_values_are_spread_evenly() -> None:
    values = np.array([uniform(3, 0, position) for position in range(20000)])
    counts, _ = np.histogram(values, bins=20, range=(0, 1))
    assert counts.min() > 850
    assert counts.max() < 1150
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.03
