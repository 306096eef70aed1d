"""`polygraft serve`."""

from __future__ import annotations

import typer

from polygraft import logs
from polygraft import serve as implementation
from polygraft.cli.options import ENGINE, HTTP, LOGS, WHERE, ModelArgument, settings_command
from polygraft.settings import Settings


@settings_command(("model", "served_model_name", *HTTP, *WHERE, *ENGINE, "workers", "drain_timeout", *LOGS))
def serve(
    settings: Settings,
    model_argument: ModelArgument = None,
) -> None:
    """Serve a model with its adapters on this machine: a gateway, workers and a private Valkey, all in one command."""
    logs.configure(settings.log_level, settings.log_format)
    raise typer.Exit(implementation.run(settings))
