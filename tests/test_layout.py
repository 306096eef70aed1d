"""The tree's own rules."""

from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_no_top_level_folder_shadows_the_standard_library() -> None:
    # `platform/__init__.py` would replace the standard library's `platform` for every process started in the root.
    shadows = [
        name
        for name in ("platform", "kernels", "adapters", "engine", "migrations")
        if (ROOT / name / "__init__.py").exists()
    ]
    assert shadows == []
