"""`polygraft adapter …`: what a tenant does with its adapters."""

from __future__ import annotations

from typing import Annotated

import typer

from polygraft.cli import show
from polygraft.cli.connect import Adapters, AsJson, adapters, command_on
from polygraft.cli.pull import pull
from polygraft.cli.push import import_, push
from polygraft.cli.remote import Json
from polygraft.cli.values import split, version

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None, help="A tenant's adapters.")
alias = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Further names for versions: name@alias.")
app.add_typer(alias, name="alias")
app.command("push")(push)
app.command("import")(import_)
app.command("pull")(pull)

LISTED = ("name", "version", "status", "rank", "size_bytes", "base_model", "aliases", "latest", "created_at")
VERSIONS = ("version", "status", "rank", "scale", "size_bytes", "digest", "created_at", "status_reason")
WHOLE = (
    "name", "version", "status", "status_reason", "id", "digest", "base_model", "rank", "scale", "target_modules",
    "size_bytes", "created_at", "owned_by", "aliases", "latest", "warnings",
)  # fmt: skip

Name = Annotated[str, typer.Argument(metavar="NAME", help="The adapter.")]
Version = Annotated[int, typer.Argument(metavar="VERSION", parser=version, help="Like v3.")]
AliasName = Annotated[str, typer.Argument(metavar="ALIAS", help="Like prod.")]
Borrower = Annotated[str, typer.Argument(metavar="TENANT", help="The name of the tenant that may call it.")]


@app.command("list")
@command_on(adapters)
def list_adapters(mine: Adapters, as_json: AsJson = False) -> None:
    """All adapters."""
    show.rows(mine.remote.listed(mine.root), LISTED, as_json)


@app.command("show")
@command_on(adapters)
def show_adapter(
    mine: Adapters,
    name: Name,
    number: Annotated[
        int | None, typer.Option("--version", parser=version, metavar="VERSION", help="Default: the one it serves.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """One adapter: what its bare name serves, or one of its versions."""
    path = mine.path(name) if number is None else mine.path(name, "versions", number)
    _show(mine.remote.call("GET", path), as_json)


@app.command()
@command_on(adapters)
def versions(mine: Adapters, name: Name, as_json: AsJson = False) -> None:
    """All versions of an adapter."""
    show.rows(mine.remote.listed(mine.path(name, "versions")), VERSIONS, as_json)


@app.command()
@command_on(adapters)
def abandon(
    mine: Adapters,
    upload: Annotated[str, typer.Argument(metavar="UPLOAD_ID", help="As `push` told it: upl_….")],
    as_json: AsJson = False,
) -> None:
    """Give up an upload that was broken off, before the server does."""
    _done(mine.remote.call("DELETE", mine.path("uploads", upload)), f"gave up {upload}", as_json)


@app.command()
@command_on(adapters)
def rollback(mine: Adapters, name: Name, to: Version, as_json: AsJson = False) -> None:
    """Have the bare name serve another version, an older or a newer one."""
    _show(mine.remote.call("POST", mine.path(name, "rollback"), json={"version": to}), as_json)


@app.command()
@command_on(adapters)
def delete(mine: Adapters, name: Name, as_json: AsJson = False) -> None:
    """Stop serving an adapter. It can be restored for a while."""
    _done(mine.remote.call("DELETE", mine.path(name)), f"deleted {name}; `adapter restore` undoes it", as_json)


@app.command()
@command_on(adapters)
def restore(mine: Adapters, name: Name, as_json: AsJson = False) -> None:
    """Serve a deleted adapter again."""
    _show(mine.remote.call("POST", mine.path(name, "restore")), as_json)


@app.command()
@command_on(adapters)
def share(
    mine: Adapters,
    name: Name,
    borrower: Borrower,
    share_prefix: Annotated[
        bool | None,
        typer.Option("--share-prefix/--no-share-prefix", help="Whether its callers share cached prompts' beginnings."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Let another tenant call an adapter, as `owner/adapter`."""
    body = {} if share_prefix is None else {"share_prefix": share_prefix}
    shared = mine.remote.call("PUT", mine.path(name, "shares", borrower), json=body)
    _done(shared, f"shared {name} with {borrower}", as_json)


@app.command()
@command_on(adapters)
def unshare(mine: Adapters, name: Name, borrower: Borrower, as_json: AsJson = False) -> None:
    """Take a shared adapter back."""
    taken = mine.remote.call("DELETE", mine.path(name, "shares", borrower))
    _done(taken, f"{borrower} can no longer call {name}", as_json)


@alias.command("set")
@command_on(adapters)
def set_alias(
    mine: Adapters,
    name: Name,
    alias_name: AliasName,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A version, v3, or a split, v3=90,v4=10.")],
    as_json: AsJson = False,
) -> None:
    """Let name@alias be a version, or each conversation one of several."""
    answer = mine.remote.call("PUT", mine.path(name, "aliases", alias_name), json=split(target))
    _done(answer, f"{name}@{alias_name} is {target}", as_json)


@alias.command("remove")
@command_on(adapters)
def remove_alias(mine: Adapters, name: Name, alias_name: AliasName, as_json: AsJson = False) -> None:
    """Take an alias away."""
    answer = mine.remote.call("DELETE", mine.path(name, "aliases", alias_name))
    _done(answer, f"{name}@{alias_name} is no more", as_json)


def _show(found: Json, as_json: bool) -> None:
    show.one(found, WHOLE, as_json)


def _done(answer: Json, line: str, as_json: bool) -> None:
    if as_json:
        show.document(answer)
    else:
        typer.echo(line)
