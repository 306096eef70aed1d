"""`polygraft gateway`."""

from __future__ import annotations

import socket
from typing import Annotated

import typer
from sqlalchemy.exc import SQLAlchemyError

from polygraft import gateway as implementation
from polygraft import logs
from polygraft.cli.options import HTTP, LOGS, WHERE, settings_command
from polygraft.db import reason
from polygraft.errors import ConfigError
from polygraft.listener import Listeners, listen
from polygraft.places import places
from polygraft.settings import Settings
from polygraft.supervisor import CONFIG_EXIT_CODE
from polygraft_migrations import MigrationError, check


@settings_command(("served_model_name", *HTTP, *WHERE, "drain_timeout", *LOGS))
def gateway(
    settings: Settings,
    listen_fd: Annotated[int | None, typer.Option(hidden=True)] = None,
    metrics_fd: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """The HTTP half alone. Its workers, on other machines too, use the same --redis-url and --blob-store."""
    logs.configure(settings.log_level, settings.log_format)
    try:
        if listen_fd is None or metrics_fd is None:
            _require_shared_places(settings)
            _require_schema(settings, alone=True)
            listeners = Listeners(
                listen(settings.host, settings.port, "--port"),
                listen(settings.host, settings.metrics_port, "--metrics-port"),
            )
        else:
            # `serve` has opened the ports.
            _require_schema(settings, alone=False)
            listeners = Listeners(socket.socket(fileno=listen_fd), socket.socket(fileno=metrics_fd))
    except ConfigError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(CONFIG_EXIT_CODE) from None
    raise typer.Exit(implementation.run(settings, listeners))


def _require_shared_places(settings: Settings) -> None:
    """Raises ConfigError for what `serve` would have provided."""
    if settings.redis_url is None:
        raise ConfigError("a gateway alone needs --redis-url, the server through which its workers take jobs")
    if not {"data_dir", "blob_store"} & settings.model_fields_set:
        raise ConfigError("a gateway alone needs --blob-store or --data-dir, a folder that it shares with its workers")


def _require_schema(settings: Settings, *, alone: bool) -> None:
    """Raises ConfigError for a database that this release cannot run on: below `serve` too, which may have been started
    before another release upgraded it.
    """
    try:
        check(places(settings).database_url)
    except MigrationError as error:
        raise ConfigError(f"the database is not ready: {error}") from None
    except (SQLAlchemyError, OSError) as error:
        if alone:
            raise ConfigError(f"the database is not ready: {reason(error)}") from None
        # `serve` has used it: it is away, and will be there for one of the next starts.
        typer.echo(f"error: the database cannot be used: {reason(error)}", err=True)
        raise typer.Exit(1) from None
