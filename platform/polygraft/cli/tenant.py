"""`polygraft tenant create | list | show | disable | enable | rename | delete`."""

from __future__ import annotations

from typing import Annotated

import typer

from polygraft.cli import show
from polygraft.cli.connect import AsJson, command_on
from polygraft.cli.operate import operator
from polygraft.cli.remote import Json, Remote, path_of

app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode=None, help="Who may have adapters and keys."
)

COLUMNS = ("name", "id", "status", "created_at")
Tenant = Annotated[str, typer.Argument(metavar="TENANT", help="A name or an id.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="a-z, 0-9, `.`, `_`, `-`.")]
Sure = Annotated[bool, typer.Option("--yes", help="Do not ask.")]


@app.command()
@command_on(operator)
def create(admin: Remote, name: Name, as_json: AsJson = False) -> None:
    """Make a tenant. It needs a key next: polygraft key create."""
    show.one(admin.call("POST", path_of("admin", "v1", "tenants"), json={"name": name}), COLUMNS, as_json)


@app.command("list")
@command_on(operator)
def list_tenants(admin: Remote, as_json: AsJson = False) -> None:
    """All tenants."""
    show.rows(admin.listed(path_of("admin", "v1", "tenants")), COLUMNS, as_json)


@app.command("show")
@command_on(operator)
def show_tenant(admin: Remote, tenant: Tenant, as_json: AsJson = False) -> None:
    """One tenant."""
    show.one(admin.call("GET", path_of("admin", "v1", "tenants", tenant)), COLUMNS, as_json)


@app.command()
@command_on(operator)
def disable(admin: Remote, tenant: Tenant, as_json: AsJson = False) -> None:
    """Refuse a tenant's keys from now on, and end what runs for it. Nothing is lost."""
    _change(admin, tenant, {"status": "disabled"}, as_json)


@app.command()
@command_on(operator)
def enable(admin: Remote, tenant: Tenant, as_json: AsJson = False) -> None:
    """Accept a disabled tenant's keys again."""
    _change(admin, tenant, {"status": "active"}, as_json)


@app.command()
@command_on(operator)
def rename(admin: Remote, tenant: Tenant, name: Name, as_json: AsJson = False) -> None:
    """Give a tenant another name. Whoever calls adapters that it shares must use it."""
    _change(admin, tenant, {"name": name}, as_json)


@app.command()
@command_on(operator)
def delete(admin: Remote, tenant: Tenant, yes: Sure = False, as_json: AsJson = False) -> None:
    """Remove a tenant, its keys and its adapters for good."""
    if not yes:
        typer.confirm(f"Delete {tenant} with all its keys and adapters?", abort=True, err=True)
    gone = admin.call("DELETE", path_of("admin", "v1", "tenants", tenant))
    if as_json:
        show.document(gone)
    else:
        typer.echo(f"deleted {tenant}")


def _change(admin: Remote, tenant: str, change: Json, as_json: bool) -> None:
    show.one(admin.call("PATCH", path_of("admin", "v1", "tenants", tenant), json=change), COLUMNS, as_json)
