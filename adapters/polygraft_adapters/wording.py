"""Names and values from untrusted files, made fit for a message: printable, on one line, of bounded length."""

from __future__ import annotations

import json
from typing import Any

_SHOWN = 200


def shown(name: str) -> str:
    """A name as a message may carry it."""
    text = name if name.isprintable() else ascii(name)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def said(value: Any) -> str:
    """A JSON value as a message may carry it, spelled as the file does."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    return shown(json.dumps(value, ensure_ascii=False))
