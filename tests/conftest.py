"""What every folder of tests shares: an offline environment, the demo model and a PostgreSQL server."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.postgres import postgres, postgres_url  # noqa: F401

from polygraft.demo import build_demo_model

ROOT = Path(__file__).parent.parent

os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(scope="session")
def root() -> Path:
    """The project's root folder."""
    return ROOT


@pytest.fixture(scope="session")
def demo_model(root: Path) -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder; the first use downloads and converts it."""
    return build_demo_model(root / ".cache" / "SmolLM2-135M-Instruct")


@pytest.fixture(scope="session")
def demo_adapters() -> dict[str, Path]:
    """The three trained adapters that lie in the tree, by name."""
    folders = sorted((ROOT / "examples" / "adapters").glob("*/adapter_config.json"))
    return {folder.parent.name: folder.parent for folder in folders}
