"""`polygraft db upgrade | check`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from sqlalchemy.exc import SQLAlchemyError

import polygraft_migrations
from polygraft import settings
from polygraft.db import reason
from polygraft.errors import ConfigError
from polygraft.places import places
from polygraft_migrations import MigrationError

app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode=None, help="The registry database's schema."
)

DataDir = Annotated[Path | None, typer.Option(help="Folder with the SQLite database.")]
DatabaseUrl = Annotated[str | None, typer.Option(help="sqlite:///path or postgresql://…")]


@app.command()
def upgrade(data_dir: DataDir = None, database_url: DatabaseUrl = None) -> None:
    """Bring the database up to this program's schema. A SQLite file that is not there is made."""
    where = places(settings.load(data_dir=data_dir, database_url=database_url))
    if database_url is None:
        where.lock.parent.mkdir(parents=True, exist_ok=True)
    try:
        polygraft_migrations.upgrade(where.database_url)
    except (MigrationError, SQLAlchemyError, OSError) as error:
        raise ConfigError(f"the database cannot be upgraded: {reason(error)}") from None
    typer.echo("The database is up to date.")


@app.command()
def check(data_dir: DataDir = None, database_url: DatabaseUrl = None) -> None:
    """Fail unless the database has exactly this program's schema."""
    where = places(settings.load(data_dir=data_dir, database_url=database_url))
    try:
        polygraft_migrations.check(where.database_url)
    except (MigrationError, SQLAlchemyError, OSError) as error:
        raise ConfigError(reason(error)) from None
    typer.echo("The database is up to date.")
