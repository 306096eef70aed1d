"""How long and how much: the queue's bounds."""

from __future__ import annotations

from dataclasses import dataclass


def milliseconds(seconds: float) -> int:
    """What the scripts count in."""
    return round(seconds * 1000)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """Times are in seconds. Tests shorten them."""

    max_queued: int = 1024
    """Jobs waiting, of all tenants and models together."""
    max_wait: float = 600.0
    """A job waits at most this long, whatever its own deadline."""
    lease: float = 30.0
    """A worker that does not report for this long loses its jobs: longer than the longest step."""
    worker_ttl: float = 5.0
    """A worker whose heartbeat is older than this is gone."""
    card_ttl: float = 60.0
    """A model whose last worker vanished is known this long (503, not 404)."""
    gateway_ttl: float = 10.0
    """A gateway whose heartbeat is older than this is gone, and so are its clients."""
    max_losses: int = 2
    """A job fails with the worker that loses it for this many times."""
    record_ttl: float = 60.0
    """How long an ended job can be read again."""
    beat: float = 1.0
    """Time between two heartbeats of a worker or a gateway."""
    quiet: float = 5.0
    """A stream that heard nothing for this long reads its job's record."""
    outage: float = 30.0
    """How long Redis may be away before what depends on it fails."""
