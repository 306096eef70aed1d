"""`polygraft demo-model`: exit codes, and errors as sentences."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from polygraft.cli import app, demo_model


def run(folder: Path) -> Result:
    return CliRunner().invoke(app, ["demo-model", str(folder)])


def test_a_refusal_is_a_sentence_and_exit_code_1(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    result = run(tmp_path)
    assert result.exit_code == 1
    assert result.stderr.endswith("is not the demo model: remove it or choose another folder\n")
    assert "error: " in result.stderr


def test_a_full_disk_is_a_sentence_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(demo_model, "build_demo_model", full)
    result = run(tmp_path / "model")
    assert result.exit_code == 1
    assert "the demo model cannot be written: [Errno 28] No space left on device" in result.stderr
