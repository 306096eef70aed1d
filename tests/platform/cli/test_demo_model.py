"""`polygraft demo-model`: exit codes, and errors as sentences."""

from pathlib import Path

import typer
from typer.testing import CliRunner

from polygraft.cli.demo_model import demo_model


def test_a_refusal_is_a_sentence_and_exit_code_1(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(demo_model)
    (tmp_path / "precious.txt").write_text("mine")
    result = CliRunner().invoke(app, [str(tmp_path)])
    assert result.exit_code == 1
    assert "is not the demo model" in result.output
    assert "Traceback" not in result.output
