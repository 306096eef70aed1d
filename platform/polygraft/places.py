"""Where one deployment keeps things: all in the data folder, unless the options name a service."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from polygraft.db import sqlite_url
from polygraft.errors import ConfigError
from polygraft.settings import Settings


@dataclass(frozen=True, slots=True)
class Places:
    """Files, folders and addresses."""

    database_url: str
    blobs: Path
    pepper: Path
    lock: Path
    valkey: Path


def places(settings: Settings) -> Places:
    """What the settings say. Raises ConfigError for a blob store that is no folder."""
    data = settings.data_dir.expanduser()
    return Places(
        database_url=settings.database_url if settings.database_url is not None else sqlite_url(data / "registry.db"),
        blobs=data / "blobs" if settings.blob_store is None else _folder(settings.blob_store),
        pepper=data / "pepper",
        lock=data / "lock",
        valkey=data / "valkey",
    )


def _folder(blob_store: str) -> Path:
    scheme, separator, path = blob_store.partition("://")
    if not separator:
        return Path(blob_store).expanduser()
    if scheme != "file":
        raise ConfigError(f"--blob-store {blob_store}: only folders are supported so far")
    return Path(path)


def served_name(settings: Settings) -> str:
    """The base model's name for clients: as told, or the last part of its folder or Hub id; empty without a model."""
    if settings.served_model_name is not None:
        return settings.served_model_name
    if not settings.model:
        return ""
    model = Path(settings.model).expanduser()
    return model.resolve().name if model.exists() else model.name
