"""The comparisons' error."""

from __future__ import annotations

from pathlib import Path

TAIL_LINES = 25


class PeerError(Exception):
    """A comparison that cannot be made; the message says why."""


def tail(log: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log, for an error's message."""
    if not log.exists():
        return "(no log)"
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
