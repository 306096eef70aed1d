"""What can be wrong with a model folder."""

from __future__ import annotations

from polygraft_engine.types import EngineError


class ModelError(EngineError):
    """A model that cannot be loaded; the message says what was found and what to do."""


class UnsupportedModel(ModelError):
    """A well-formed model that this engine does not compute."""
