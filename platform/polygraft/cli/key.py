"""`polygraft key create | list | rotate | revoke`."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from polygraft.cli import show
from polygraft.cli.connect import AsJson, command_on
from polygraft.cli.operate import operator
from polygraft.cli.remote import Json, Remote, path_of
from polygraft.cli.values import duration, scope

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None, help="What tenants call with.")

COLUMNS = ("id", "name", "prefix", "status", "scopes", "models", "created_at", "expires_at")
Tenant = Annotated[str, typer.Argument(metavar="TENANT", help="A name or an id.")]
KeyId = Annotated[str, typer.Argument(metavar="KEY_ID", help="As listed: key_….")]


@app.command()
@command_on(operator)
def create(
    admin: Remote,
    tenant: Tenant,
    name: Annotated[str, typer.Option(help="What it is for.")] = "default",
    scopes: Annotated[
        list[str] | None,
        typer.Option(
            "--scope",
            parser=scope,
            metavar="SCOPE",
            help="Only this: inference, adapters:read, adapters:write or usage:read. Repeat it for more; default: all.",
        ),
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="The only model that it may call. Repeat it for more; default: any.")
    ] = None,
    expires_in: Annotated[
        timedelta | None, typer.Option(parser=duration, metavar="TIME", help="Like 12h or 30d; default: never.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a key and print it: alone on stdout, this once."""
    body: Json = {"name": name}
    if scopes:
        body["scopes"] = scopes
    if model:
        body["models"] = model
    if expires_in is not None:
        body["expires_at"] = (datetime.now(UTC) + expires_in).replace(microsecond=0).isoformat()
    _show_made(admin.call("POST", _keys(tenant), json=body), as_json)


@app.command("list")
@command_on(operator)
def list_keys(admin: Remote, tenant: Tenant, as_json: AsJson = False) -> None:
    """A tenant's keys, by their first characters."""
    show.rows(admin.listed(_keys(tenant)), COLUMNS, as_json)


@app.command()
@command_on(operator)
def rotate(
    admin: Remote,
    tenant: Tenant,
    key_id: KeyId,
    grace: Annotated[
        timedelta, typer.Option(parser=duration, metavar="TIME", help="How long the old key still works.")
    ] = timedelta(0),
    as_json: AsJson = False,
) -> None:
    """Make a key that may do what another may, and let the old one end. Prints the new key, this once."""
    body = {"grace_seconds": int(grace.total_seconds())}
    _show_made(admin.call("POST", f"{_keys(tenant)}{path_of(key_id, 'rotate')}", json=body), as_json)


@app.command()
@command_on(operator)
def revoke(admin: Remote, tenant: Tenant, key_id: KeyId, as_json: AsJson = False) -> None:
    """Refuse a key from now on, on every gateway within two seconds."""
    gone = admin.call("DELETE", f"{_keys(tenant)}{path_of(key_id)}")
    if as_json:
        show.document(gone)
    else:
        typer.echo(f"revoked {key_id}")


def _keys(tenant: str) -> str:
    return path_of("admin", "v1", "tenants", tenant, "keys")


def _show_made(made: Json, as_json: bool) -> None:
    """The key alone on stdout, so that a shell can take it into a variable."""
    if as_json:
        show.document(made)
        return
    show.remark(f"{made['id']} {made['name']}: keep this key, it is shown only now")
    typer.echo(made["key"])
