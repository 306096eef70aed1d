"""Every backend draws what the reference draws, whatever is cut off."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from polygraft_kernels.api import Backend, SampleTensors
from polygraft_kernels.reference import ReferenceBackend

ROWS = 64
ROUNDING = 1e-5
LIMITS = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.0, "top_k": 7},
    {"top_k": 1},
    {"top_k": 3},
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
    uniform[0], uniform[1] = 2.0**-24, 1.0 - 2.0**-24
    return SampleTensors(
        torch.full((ROWS,), temperature),
        torch.full((ROWS,), top_k),
        torch.full((ROWS,), top_p),
        torch.full((ROWS,), min_p),
        uniform,
    )


def assert_drawn(backend: Backend, logits: torch.Tensor, settings: SampleTensors) -> None:
    """What the reference draws; where float32 weights leave it open on which side of an edge a token is, either way."""
    reference = ReferenceBackend(torch.device("cpu"))
    near = [
        replace(
            settings,
            uniform=(settings.uniform + uniform).clamp(0.0, 1.0 - 2.0**-24),
            top_p=(settings.top_p + top_p).clamp(0.0, 1.0) if settings.top_p[0] < 1.0 else settings.top_p,
        )
        for uniform in (-ROUNDING, 0.0, ROUNDING)
        for top_p in (-ROUNDING, 0.0, ROUNDING)
    ]
    allowed = list(zip(*(reference.sample(logits, each).tolist() for each in near), strict=True))
    drawn = backend.sample(logits, settings).tolist()
    assert all(token in tokens for token, tokens in zip(drawn, allowed, strict=True))
    assert any(len(set(tokens)) == 1 for tokens in allowed)


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("vocabulary", [3, 250, 256, 1000])
@pytest.mark.parametrize("spread", [0.5, 6.0])
def test_it_draws_what_the_reference_draws(
    backend: Backend, limits: dict[str, float], vocabulary: int, spread: float
) -> None:
    logits = torch.randn(ROWS, vocabulary, generator=torch.Generator().manual_seed(1)) * spread
    settings = how(**limits)  # type: ignore[arg-type]
    assert_drawn(backend, logits, settings)


@pytest.mark.parametrize("limits", LIMITS)
def test_of_equal_tokens_at_an_edge_the_lowest_stay(backend: Backend, limits: dict[str, float]) -> None:
    logits = torch.randint(0, 4, (ROWS, 600), generator=torch.Generator().manual_seed(1)).float()
    settings = how(**limits)  # type: ignore[arg-type]
    assert_drawn(backend, logits, settings)


def test_banned_tokens_are_never_drawn(backend: Backend) -> None:
    logits = torch.full((ROWS, 600), float("-inf"))
    logits[:, 300] = 1.0
    logits[:, 599] = 0.0
    drawn = backend.sample(logits, how()).tolist()
    assert set(drawn) == {300, 599}


def test_the_smallest_temperature_overflows_nothing(backend: Backend) -> None:
    logits = torch.randn(ROWS, 600, generator=torch.Generator().manual_seed(1)) * 1e4
    assert backend.sample(logits, how(temperature=1e-5)).tolist() == logits.argmax(-1).tolist()
