"""The names of everything the queue keeps in Redis. The scripts get these constants too, by the same names.

A constant that ends in a colon is a prefix: the id of the job, worker, gateway or model follows.
"""

from __future__ import annotations

JOB = "pg:job:"
"""hash: payload, state (queued, running, done), model, tenant, gateway, choices, deadline (ms, 0: none), attempt,
losses, and once they apply worker and cancelled.
"""
EVENTS = "pg:events:"
"""list: the job's encoded events; an event's index is its seq."""
QUEUED = "pg:queued"
"""zset: queued jobs by the time (ms) at which waiting becomes pointless."""
RUNNING = "pg:running"
"""zset: claimed jobs by the end (ms) of their lease."""
RING = "pg:ring:"
"""list, per model: the tenants with queued jobs, next to be served first."""
TENANT_QUEUE = "pg:tenant:"
"""list, per model and tenant (length-prefixed, so that no two pairs share a name): queued jobs, oldest first."""
WAKE = "pg:wake:"
"""list, per model: one mark per job that was queued since the queue was last empty; idle workers block on it."""
NUDGE = "pg:nudge:"
"""list, per worker: a mark that there is something to look at, although nothing was queued."""
CANCELS = "pg:cancels:"
"""set, per worker: its jobs that are to be cancelled."""
CLAIM = "pg:claim:"
"""hash, per worker: its latest claim's nonce and answer."""
WORKER = "pg:worker:"
"""string, per worker, that expires: its latest WorkerStatus."""
WORKERS = "pg:workers"
"""set: the ids under which WORKER may hold something."""
CARD = "pg:card:"
"""hash, per model: card (JSON) and created."""
CARDS = "pg:cards"
"""set: the models under which CARD may hold something."""
GATEWAYS = "pg:gateways"
"""zset: gateways by the time (ms) at which they count as gone."""
GATEWAY_JOBS = "pg:gateway:"
"""set, per gateway: its jobs that have not ended."""
CHANNEL = "pg:to:"
"""channel, per gateway: StepMessages."""
REVOKED = "pg:revoked"
"""channel, of all gateways: AccessChanges."""
LEASE = "pg:lease:"
"""string, per background task, that expires: the gateway that does it."""
REAPER = "pg:reaper"
"""hash: last (ms) and since (ms): from when on somebody has reaped without a pause."""

NAMES = {name: value for name, value in globals().items() if name.isupper()}
