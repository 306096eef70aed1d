"""`polygraft worker`."""

from __future__ import annotations

import importlib
import os

import typer

from polygraft import logs
from polygraft.cli.options import ENGINE, LOGS, ModelArgument, settings_command
from polygraft.errors import ConfigError
from polygraft.settings import Settings
from polygraft.supervisor import CONFIG_EXIT_CODE
from polygraft.worker.environment import usable_cores, worker_environment


@settings_command(
    ("model", "served_model_name", "data_dir", "redis_url", "blob_store", *ENGINE, "drain_timeout", *LOGS)
)
def worker(
    settings: Settings,
    model_argument: ModelArgument = None,
) -> None:
    """The computing half alone: loads a model and takes jobs from --redis-url."""
    logs.configure(settings.log_level, settings.log_format)
    try:
        _require(settings)
    except ConfigError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(CONFIG_EXIT_CODE) from None
    wanted = worker_environment(settings, os.environ, usable_cores())
    os.environ.clear()
    os.environ.update(wanted)
    # torch reads the environment when it is imported, and the engine imports torch.
    importlib.import_module("polygraft.worker.main").run(settings)


def _require(settings: Settings) -> None:
    if not settings.model:
        raise ConfigError("which model? polygraft worker MODEL, a local folder or a Hub id")
    if settings.redis_url is None:
        raise ConfigError("a worker alone needs --redis-url, the server from which it takes jobs")
    if not {"data_dir", "blob_store"} & settings.model_fields_set:
        raise ConfigError("a worker alone needs --blob-store or --data-dir, a folder that it shares with its gateways")
