"""What can be wrong with a model folder."""

from __future__ import annotations

from polygraft_engine.types import EngineError


class ModelError(EngineError):
    """A model that cannot be loaded; the message says what was found and what to do."""


class UnsupportedModel(ModelError):
    """A well-formed model that this engine does not compute."""


def first_line(error: Exception) -> str:
    """What a library's error says, without the pages that may follow."""
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
