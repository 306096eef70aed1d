"""Reading a model folder's JSON files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from polygraft_engine.models.errors import ModelError


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises ModelError for a file that is not there, or holds anything else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise ModelError(f"{path} holds {type(found).__name__}, not a JSON object")
    return found


def read_optional_object(path: Path) -> dict[str, Any]:
    """As read_object; nothing if there is no such file."""
    return read_object(path) if path.is_file() else {}
