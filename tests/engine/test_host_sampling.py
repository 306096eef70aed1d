"""Drawing on the host equals the kernels' specification."""

from __future__ import annotations

import pytest
import torch

from polygraft_engine.host_sampling import sample_on_host
from polygraft_kernels.api import SampleTensors
from polygraft_kernels.reference import ReferenceBackend

ROWS = 64
LIMITS = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.0, "top_k": 7},
    {"top_k": 1},
    {"top_k": 1000},
    {"top_p": 0.9},
    {"top_p": 0.01},
    {"top_p": 0.999},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 50, "top_p": 0.8, "min_p": 0.02, "temperature": 1.5},
]


def how(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> SampleTensors:
    uniform = torch.rand(ROWS, generator=torch.Generator().manual_seed(5))
    uniform[0], uniform[1] = 0.0, 1.0 - 2.0**-24
    return SampleTensors(
        torch.full((ROWS,), temperature),
        torch.full((ROWS,), top_k),
        torch.full((ROWS,), top_p),
        torch.full((ROWS,), min_p),
        uniform,
    )


def expected(logits: torch.Tensor, settings: SampleTensors) -> list[int]:
    return ReferenceBackend(torch.device("cpu")).sample(logits, settings).tolist()


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("vocabulary", [3, 256, 1000])
@pytest.mark.parametrize("spread", [0.5, 6.0])
def test_it_draws_what_the_reference_draws(limits: dict[str, float], vocabulary: int, spread: float) -> None:
    logits = torch.randn(ROWS, vocabulary, generator=torch.Generator().manual_seed(1)) * spread
    settings = how(**limits)  # type: ignore[arg-type]
    assert sample_on_host(logits, settings) == expected(logits, settings)


@pytest.mark.parametrize("limits", LIMITS)
def test_of_equal_tokens_at_an_edge_the_lowest_stay(limits: dict[str, float]) -> None:
    logits = torch.randint(0, 4, (ROWS, 600), generator=torch.Generator().manual_seed(1)).float()
    settings = how(**limits)  # type: ignore[arg-type]
    assert sample_on_host(logits, settings) == expected(logits, settings)


def test_banned_tokens_are_never_drawn() -> None:
    logits = torch.full((ROWS, 600), float("-inf"))
    logits[:, 300] = 1.0
    logits[:, 599] = 0.0
    drawn = sample_on_host(logits, how())
    assert set(drawn) == {300, 599}


def test_the_smallest_temperature_overflows_nothing() -> None:
    logits = torch.randn(ROWS, 600, generator=torch.Generator().manual_seed(1)) * 1e4
    assert sample_on_host(logits, how(temperature=1e-5)) == logits.argmax(-1).tolist()
