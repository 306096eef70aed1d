"""How far a transfer is."""

from __future__ import annotations

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from polygraft.cli import show


def progress_bar() -> Progress:
    """How much of how much, how fast, how much longer; on stderr, and only where somebody looks."""
    console = show.err()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
    return Progress(
        *columns, TransferSpeedColumn(), TimeRemainingColumn(), console=console, disable=not console.is_terminal
    )
