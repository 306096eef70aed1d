"""The demo model on disk, built once and kept in the project's cache."""

from pathlib import Path

import pytest

from polygraft.demo import build_demo_model


@pytest.fixture(scope="session")
def demo_model(root: Path) -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder; the first use downloads and converts it."""
    return build_demo_model(root / ".cache" / "SmolLM2-135M-Instruct")
