"""The tiny model that engine tests run on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.engine.bench import TINY_CONFIG, Bench, write_model


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """The tiny Llama."""
    return Bench(write_model(tmp_path_factory.mktemp("models") / "tiny", TINY_CONFIG))


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`make_model(**changes)`: a folder with a tiny model whose config differs in `changes`."""

    def make(**changes: object) -> Path:
        return write_model(tmp_path_factory.mktemp("models") / "changed", {**TINY_CONFIG, **changes})

    return make
