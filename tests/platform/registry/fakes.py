"""Contents, who acts, and what the fixtures that act are like."""

from collections.abc import Awaitable, Callable
from typing import Any

from polygraft.audit import Actor
from polygraft.registry.intake import Accepted, Ticket
from polygraft_adapters.types import AdapterInfo

ACTOR = Actor("tenant", "key_1", "10.0.0.1", "req_1")
Push = Callable[..., Awaitable[Accepted]]
Begin = Callable[..., Awaitable[Ticket]]
Audited = Callable[[], Awaitable[list[tuple[str, dict[str, Any]]]]]


def info_of(content: str, **other: Any) -> AdapterInfo:
    """An adapter of that content."""
    fields: dict[str, Any] = {
        "digest": f"sha256:{content}",
        "rank": 8,
        "scale": 2.0,
        "targets": ("q_proj", "v_proj"),
        "size_bytes": 100,
        "base_model": None,
        "warnings": (),
    }
    return AdapterInfo(**fields | other)
