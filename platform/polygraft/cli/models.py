"""`polygraft models`."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from polygraft_engine.models.architecture import supported_architectures


def models(
    as_json: Annotated[bool, typer.Option("--json", help="As a JSON array.")] = False,
) -> None:
    """The model architectures that can be served, by the class name in a model's config.json."""
    rows = [{"architecture": row.name, "models": row.models} for row in supported_architectures()]
    if as_json:
        typer.echo(json.dumps(rows))
        return
    table = Table("architecture", "models")
    for row in rows:
        table.add_row(row["architecture"], row["models"])
    Console().print(table)
