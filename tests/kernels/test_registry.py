"""Choosing a backend: by name, or the fastest that runs, saying why not a faster one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from polygraft_kernels.api import BackendUnavailable, KernelError
from polygraft_kernels.native import create, create_isa, runnable, units
from polygraft_kernels.registry import choose

CPU = torch.device("cpu")


@pytest.fixture
def _not_built(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a machine without a compiler: the extension was skipped."""
    monkeypatch.setattr(units, "find_spec", lambda name: None)
    units.runnable.cache_clear()
    units._library.cache_clear()
    yield
    units.runnable.cache_clear()
    units._library.cache_clear()


def test_auto_takes_the_native_kernels() -> None:
    choice = choose("auto", CPU, torch.bfloat16)
    assert choice.backend.name == "native"
    assert choice.passed_over == ()


def test_auto_says_why_it_passes_the_native_kernels_over() -> None:
    choice = choose("auto", CPU, torch.float16)
    assert choice.backend.name == "reference"
    assert "float16" in choice.passed_over[0]


@pytest.mark.usefixtures("_not_built")
def test_without_a_compiler_auto_takes_the_reference_and_says_how_to_get_better() -> None:
    choice = choose("auto", CPU, torch.bfloat16)
    assert choice.backend.name == "reference"
    assert "native: the native kernels are not built: install g++" in choice.passed_over[0]


@pytest.mark.usefixtures("_not_built")
def test_without_a_compiler_native_by_name_is_refused() -> None:
    with pytest.raises(BackendUnavailable, match="install g"):
        choose("native", CPU, torch.bfloat16)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(BackendUnavailable, match="auto, reference, native"):
        choose("cuda", CPU, torch.float32)


def test_a_backend_that_cannot_do_what_is_asked_says_so() -> None:
    with pytest.raises(BackendUnavailable, match="float64"):
        choose("reference", CPU, torch.float64)
    with pytest.raises(BackendUnavailable, match="not on meta"):
        create(torch.device("meta"), torch.float32)
    assert issubclass(BackendUnavailable, KernelError)


def test_instruction_sets_are_chosen_by_the_processor() -> None:
    assert runnable()[0] == "portable"
    assert create(CPU, torch.float32).unit.isa == runnable()[-1]
    with pytest.raises(BackendUnavailable, match="no instruction set is called 'sse9'"):
        create_isa("sse9")


@pytest.mark.parametrize("isa", units.ISAS)
def test_an_instruction_set_runs_or_is_refused(isa: str) -> None:
    if isa in runnable():
        assert create_isa(isa).unit.isa == isa
    else:
        with pytest.raises(BackendUnavailable, match="this processor cannot run"):
            create_isa(isa)
