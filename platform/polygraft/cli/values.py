"""How values are written on the command line."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import typer

from polygraft.tenancy.principal import TENANT_SCOPES

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LONGEST = timedelta(days=36500)


def duration(text: str | timedelta) -> timedelta:
    """`90s`, `15m`, `12h`, `30d`. Raises BadParameter."""
    if isinstance(text, timedelta):
        return text  # a default
    found = re.fullmatch(r"([0-9]{1,9})([smhd]?)", text)
    if found is None:
        raise typer.BadParameter(f"{text!r} is no length of time; write it like 90s, 15m, 12h or 30d")
    length = timedelta(seconds=int(found[1]) * _UNITS[found[2] or "s"])
    if length > _LONGEST:
        raise typer.BadParameter(f"{text!r} is longer than a hundred years")
    return length


def scope(text: str) -> str:
    """One of the rights that a tenant's key can have. Raises BadParameter."""
    if text not in TENANT_SCOPES:
        raise typer.BadParameter(f"{text!r} is no scope; there are {', '.join(sorted(TENANT_SCOPES))}")
    return text


def version(text: str) -> int:
    """`v3` or `3`. Raises BadParameter."""
    found = re.fullmatch(r"v?([1-9][0-9]{0,8})", text)
    if found is None:
        raise typer.BadParameter(f"{text!r} is no version; write it like v3")
    return int(found[1])


def split(text: str) -> dict[str, Any]:
    """`v3`, or `v3=90,v4=10`, as the API takes it. Raises BadParameter."""
    if "=" not in text:
        return {"version": version(text)}
    parts = []
    for part in text.split(","):
        name, _, weight = part.partition("=")
        if not re.fullmatch(r"[0-9]{1,9}", weight):
            raise typer.BadParameter(f"{part!r} is no share; write a split like v3=90,v4=10")
        parts.append({"version": version(name), "weight": int(weight)})
    return {"split": parts}


def reference(text: str) -> tuple[str, str | None]:
    """`name`, `name@v3` or `name@alias`: the name, and what is behind the `@`."""
    name, separator, rest = text.partition("@")
    return name, rest if separator else None
