"""Prompts in, tokens and text out: the batched engine. No HTTP, no database, no Redis, no tenants."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from polygraft_engine.types import SamplingParams

if TYPE_CHECKING:
    from polygraft_engine.llm import LLM

__all__ = ["LLM", "SamplingParams"]


def __getattr__(name: str) -> Any:
    # LLM needs torch; processes that only want the types must not pay for it.
    if name == "LLM":
        return import_module("polygraft_engine.llm").LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
