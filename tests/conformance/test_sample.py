"""Sampling: the formulas on small vocabularies, and every row on its own."""

from __future__ import annotations

import torch
from torch import Tensor

from polygraft_kernels.api import Backend, SampleTensors


def how(
    uniform: list[float], temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> SampleTensors:
    rows = len(uniform)
    return SampleTensors(
        torch.full((rows,), temperature),
        torch.full((rows,), top_k, dtype=torch.int64),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
        torch.tensor(uniform),
    )


UNIFORM = [0.0, 0.05, 0.15, 0.35, 0.65, 0.95, 1 - 2**-24]
LOGITS = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()


def rows_of(logits: Tensor) -> Tensor:
    return logits.repeat(len(UNIFORM), 1)


def test_the_cdf_is_inverted_in_order_of_token_id(backend: Backend) -> None:
    assert backend.sample(rows_of(LOGITS), how(UNIFORM)).tolist() == [0, 0, 1, 1, 2, 3, 3]


def test_greedy_takes_the_lowest_of_the_largest(backend: Backend) -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 5.0, 5.0, 5.0]])
    assert backend.sample(logits, how([0.99, 0.5], temperature=0.0)).tolist() == [1, 0]


def test_temperature_sharpens(backend: Backend) -> None:
    assert set(backend.sample(rows_of(LOGITS), how([*UNIFORM[1:6], 0.5, 0.6], temperature=0.01)).tolist()) == {1}


def test_top_k(backend: Backend) -> None:
    assert backend.sample(rows_of(LOGITS), how(UNIFORM, top_k=2)).tolist() == [1, 1, 1, 1, 3, 3, 3]


def test_the_nucleus_is_the_smallest_that_reaches_its_mass(backend: Backend) -> None:
    assert set(backend.sample(rows_of(LOGITS), how(UNIFORM, top_p=0.65)).tolist()) == {1, 3}
    assert set(backend.sample(rows_of(LOGITS), how(UNIFORM, top_p=0.75)).tolist()) == {1, 2, 3}
    assert set(backend.sample(rows_of(LOGITS), how(UNIFORM, top_p=0.0)).tolist()) == {1}


def test_min_p_is_relative_to_the_likeliest(backend: Backend) -> None:
    assert set(backend.sample(rows_of(LOGITS), how(UNIFORM, min_p=0.6)).tolist()) == {1, 3}


def test_forbidden_tokens_are_never_drawn(backend: Backend) -> None:
    logits = torch.tensor([-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf])
    assert set(backend.sample(rows_of(logits), how(UNIFORM)).tolist()) == {1, 3}


def test_rows_do_not_depend_on_their_neighbours(backend: Backend) -> None:
    rows = 23
    logits = torch.randn(rows, 1000) * 3
    mixed = SampleTensors(
        torch.rand(rows) * (torch.arange(rows) % 3 > 0),
        torch.randint(0, 50, (rows,)) * (torch.arange(rows) % 2),
        torch.rand(rows),
        torch.rand(rows) * 0.1,
        torch.rand(rows),
    )
    together = backend.sample(logits, mixed)
    for row in range(rows):
        one = slice(row, row + 1)
        alone = SampleTensors(*(getattr(mixed, name)[one] for name in SampleTensors.__slots__))
        assert backend.sample(logits[one], alone).tolist() == [together[row].item()]
