"""What the commands print: tables for people, one JSON document for machines, nothing that could steer a terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

NONE = "–"
WIDE = 240
"""Columns of a table that goes into a file or a pipe: nothing is cut off there."""

Row = Mapping[str, Any]


def printable(text: str) -> str:
    """`text` on one line and without control characters; names and reasons can be somebody else's words."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


def out() -> Console:
    """Where results go."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else WIDE)


def err() -> Console:
    """Where progress and remarks go."""
    return Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else WIDE)


def remark(text: str) -> None:
    """A line for the person at the terminal, beside the results."""
    err().print(Text(printable(text)), style="dim")


def document(found: object) -> None:
    """One JSON document."""
    typer.echo(json.dumps(found, indent=2))


def rows(found: Sequence[Row], columns: Sequence[str], as_json: bool) -> None:
    """A listing, a line for each object."""
    if as_json:
        document(found)
        return
    if not found:
        remark("There are none.")
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(_heading(column), justify="right" if column in _NUMBERS else "left", overflow="fold")
    for row in found:
        table.add_row(*(Text(cell(column, row.get(column))) for column in columns))
    out().print(table)


def one(found: Row, columns: Sequence[str], as_json: bool) -> None:
    """One object, a line for each field."""
    if as_json:
        document(found)
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for column in columns:
        if column in found:
            table.add_row(_heading(column), Text(cell(column, found[column])))
    out().print(table)


def problems(found: Iterable[Row]) -> None:
    """All that is wrong with an adapter: where, what, and what to do about it."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("where", "problem", "hint"):
        table.add_column(heading, overflow="fold")
    for problem in found:
        where = problem.get("tensor", problem.get("field"))
        told = (where, problem.get("problem"), problem.get("hint"))
        table.add_row(*("" if part is None else Text(printable(str(part))) for part in told))
    err().print(table)


def cell(column: str, value: Any) -> str:
    """A value as people read it."""
    if value is None:
        return NONE
    return printable(_FORMATS.get(column, _plain)(value))


def size(count: float) -> str:
    """A number of bytes: 12.3 MiB."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def split(targets: Any) -> str:
    """What an alias stands for: `v3`, or `v3=90,v4=10`."""
    if isinstance(targets, Mapping):
        targets = targets["split"] if "split" in targets else [{"version": targets["version"], "weight": 1}]
    if isinstance(targets, int):
        return f"v{targets}"
    if len(targets) == 1:
        return f"v{targets[0]['version']}"
    return ",".join(f"v{part['version']}={part['weight']}" for part in targets)


def _moment(value: Any) -> str:
    """Seconds since 1970, or ISO 8601, as local time."""
    if isinstance(value, str):
        moment = datetime.fromisoformat(value)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
    else:
        moment = datetime.fromtimestamp(value, UTC)
    return moment.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _aliases(value: Any) -> str:
    return "; ".join(f"{name} → {split(targets)}" for name, targets in value.items())


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={_plain(part)}" for name, part in value.items())
    if isinstance(value, list):
        return ", ".join(_plain(part) for part in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _heading(column: str) -> str:
    return _HEADINGS.get(column, column.removesuffix("_at").replace("_", " "))


_FORMATS: Mapping[str, Callable[[Any], str]] = {
    "created_at": _moment,
    "expires_at": _moment,
    "revoked_at": _moment,
    "deleted_at": _moment,
    "at": _moment,
    "size_bytes": size,
    "version": lambda value: f"v{value}",
    "aliases": _aliases,
    "latest": lambda value: f"v{value['version']} {value['status']}",
}
_HEADINGS = {"size_bytes": "size", "target_modules": "targets", "status_reason": "reason", "object_id": "of"}
_NUMBERS = frozenset({"size_bytes", "rank", "scale"})
