"""Where one deployment keeps things: all in the data folder, unless the options name a service."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from polygraft.blobs import BlobPlace, blob_place
from polygraft.db import sqlite_url
from polygraft.settings import Settings


@dataclass(frozen=True, slots=True)
class Places:
    """Files, folders and addresses."""

    database_url: str
    blobs: BlobPlace
    pepper: Path
    lock: Path
    valkey: Path


def places(settings: Settings) -> Places:
    """What the settings say. Raises ConfigError for a blob store that is neither a folder nor a bucket."""
    data = settings.data_dir.expanduser()
    return Places(
        database_url=settings.database_url if settings.database_url is not None else sqlite_url(data / "registry.db"),
        blobs=blob_place(settings.blob_store, data),
        pepper=data / "pepper",
        lock=data / "lock",
        valkey=data / "valkey",
    )


def served_name(settings: Settings) -> str:
    """The base model's name for clients: as told, or the last part of its folder or Hub id; empty without a model."""
    if settings.served_model_name is not None:
        return settings.served_model_name
    if not settings.model:
        return ""
    model = Path(settings.model).expanduser()
    return model.resolve().name if model.exists() else model.name
