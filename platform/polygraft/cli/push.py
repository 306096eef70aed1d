"""`polygraft adapter push PATH --name N` and `polygraft adapter import SOURCE --name N`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from polygraft.cli import show
from polygraft.cli.archive import open_archive
from polygraft.cli.connect import Adapters, AsJson, adapters, command_on
from polygraft.cli.progress import progress_bar
from polygraft.cli.remote import Json, RemoteError
from polygraft.cli.upload import Sender

SECONDS_BETWEEN_LOOKS = 0.5

Name = Annotated[str, typer.Option("--name", help="The adapter's name; content that is new is its next version.")]
Base = Annotated[str | None, typer.Option(help="The served model that it is for; needed where there are several.")]
Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until the server has checked it.")]
Patience = Annotated[float, typer.Option("--timeout", min=0, help="Most seconds to wait for the check.")]


@command_on(adapters)
def push(
    mine: Adapters,
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A PEFT folder, a .zip or a .tar.gz.")],
    name: Name,
    base_model: Base = None,
    resume: Annotated[
        str | None, typer.Option(metavar="UPLOAD_ID", help="Go on with an upload that was broken off.")
    ] = None,
    wait: Wait = True,
    timeout: Patience = 600.0,
    as_json: AsJson = False,
) -> None:
    """Upload an adapter, show how far it is, and print what it became.

    A connection that breaks is taken up again by itself. An upload that was broken off altogether says on stderr with
    which --resume it goes on: the server keeps what it has for a day, and nothing is kept on this machine.
    """
    sender = Sender(mine.remote, mine.root, open_archive(path))
    if resume is None:
        upload = sender.begin(name, base_model)
    else:
        upload = resume
        sender.resume(upload, name)
    try:
        with progress_bar() as bar:
            task = bar.add_task(name, total=sender.archive.size)
            sender.send(upload, lambda done: bar.update(task, completed=done))
        found = sender.complete(upload, name)
    except (RemoteError, KeyboardInterrupt) as broken:
        if isinstance(broken, KeyboardInterrupt) or broken.passing:
            show.remark(f"the same command goes on from here with --resume {upload}")
        raise
    _finish(mine, found, wait, timeout, as_json)


@command_on(adapters)
def import_(
    mine: Adapters,
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="hf://org/repo@revision, s3://bucket/folder or file:///folder.")
    ],
    name: Name,
    base_model: Base = None,
    wait: Wait = True,
    timeout: Patience = 600.0,
    as_json: AsJson = False,
) -> None:
    """Have the server fetch an adapter. A folder must lie below one of the server's --adapter-root."""
    body = {"name": name, "source": source}
    if base_model is not None:
        body["base_model"] = base_model
    found = mine.remote.call("POST", mine.path("import"), json=body)
    _finish(mine, found, wait, timeout, as_json)


def _finish(mine: Adapters, answer: Json, wait: bool, timeout: float, as_json: bool) -> None:
    """Print what a new version became. Raises RemoteError for one that failed its check."""
    newer = answer["latest"]
    found = answer if newer is None or newer["status"] != "validating" else newer
    if wait:
        found = _until_checked(mine, found, timeout)
    if as_json:
        show.document(found)
        return
    for warning in found["warnings"]:
        show.remark(f"warning: {warning}")
    if found["status"] == "validating":
        typer.echo(f"{found['name']}@v{found['version']} is being checked")
        return
    typer.echo(f"{found['name']}@v{found['version']}  {found['digest']}  rank {found['rank']}  {found['status']}")


def _until_checked(mine: Adapters, found: Json, seconds: float) -> Json:
    """The version once its check has ended well. Raises RemoteError for one that failed, or takes too long."""
    deadline = time.monotonic() + seconds
    while found["status"] == "validating":
        if time.monotonic() > deadline:
            raise RemoteError(f"{found['name']}@v{found['version']} is still being checked; look again later")
        time.sleep(SECONDS_BETWEEN_LOOKS)
        found = _look(mine, found)
    if found["status"] == "failed":
        problems = found.get("errors")
        raise RemoteError(
            str(found["status_reason"]),
            status=422,
            type="invalid_request_error",
            code="invalid_adapter",
            problems=() if problems is None else problems,
        )
    return found


def _look(mine: Adapters, found: Json) -> Json:
    """The version as it is by now. One whose contents the name had before is gone, and the older one is served."""
    try:
        return mine.remote.call("GET", mine.path(found["name"], "versions", found["version"]))
    except RemoteError as error:
        if error.status != 404:
            raise
        return mine.remote.call("GET", mine.path(found["name"]))
