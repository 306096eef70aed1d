"""`polygraft audit`."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from polygraft.cli import show
from polygraft.cli.connect import AsJson, command_on
from polygraft.cli.operate import operator
from polygraft.cli.remote import Remote, path_of
from polygraft.cli.values import duration

COLUMNS = ("at", "actor", "key_id", "address", "action", "object_id", "tenant_id", "detail")


@command_on(operator)
def audit(
    admin: Remote,
    tenant: Annotated[str | None, typer.Option(help="Whose objects: a name or an id.")] = None,
    action: Annotated[str | None, typer.Option(help="Like adapter.rollback, or adapter for all of them.")] = None,
    key_id: Annotated[str | None, typer.Option(help="Who acted, by the key: key_….")] = None,
    object_id: Annotated[str | None, typer.Option("--object", help="What it was done to, by its id.")] = None,
    since: Annotated[
        timedelta | None, typer.Option(parser=duration, metavar="TIME", help="Only the last while, like 12h or 30d.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Most entries.")] = 50,
    as_json: AsJson = False,
) -> None:
    """Who did what to which object, from where, when; the newest first."""
    found = admin.listed(
        path_of("admin", "v1", "audit"),
        limit,
        tenant=tenant,
        action=action,
        key_id=key_id,
        object_id=object_id,
        since=None if since is None else (datetime.now(UTC) - since).isoformat(),
    )
    show.rows(found, COLUMNS, as_json)
