"""Puts the parts of uploading together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from polygraft.db import Database
from polygraft.registry.intake import Intake
from polygraft.registry.live import LiveModels
from polygraft.registry.uploads.body import Turns
from polygraft.registry.uploads.resumable import Resumable
from polygraft.registry.uploads.service import Uploads
from polygraft.registry.uploads.sources import Sources
from polygraft.registry.uploads.staging import Staging, StagingSource
from polygraft.registry.uploads.validator import BlobSink, Validator
from polygraft.registry.validation import Check, CheckLimits

PER_TENANT = 4
OVERALL = 32


class Blobs(BlobSink, StagingSource, Protocol):
    """The part of the blob store that uploads need."""


@dataclass(frozen=True, slots=True)
class Receiving:
    """What the gateway has to hold: the service of the routes, and what goes on behind them."""

    uploads: Uploads
    validator: Validator


def assemble(
    database: Database,
    intake: Intake,
    live: LiveModels,
    blobs: Blobs,
    check: Check,
    *,
    max_bytes: int,
    adapter_roots: Sequence[str] = (),
    import_sources: Sequence[str] = (),
) -> Receiving:
    """`check` is `Checkers.validate`, but for tests; `max_bytes` is the largest adapter, packed or not; the rest says
    where adapters may be imported from.

    The caller runs `validator.keep_going()` beside the server, and `validator.close()` after it.
    """
    staging = Staging(blobs)
    validator = Validator(database, intake, live, blobs, staging, CheckLimits(max_bytes), check)
    uploads = Uploads(
        intake,
        live,
        staging,
        validator,
        Resumable(database, staging, max_bytes),
        Sources(adapter_roots, import_sources, max_bytes, staging.require_room),
        Turns(PER_TENANT, OVERALL),
        max_bytes,
    )
    return Receiving(uploads, validator)
