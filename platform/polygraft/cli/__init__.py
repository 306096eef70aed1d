"""The command line. A command's module is imported when it runs, so that `polygraft --help` stays quick."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from importlib.metadata import version
from typing import Annotated

import typer

from polygraft.cli.lazy import LazyGroup, Target

COMMANDS = (
    Target("serve", "polygraft.cli.serve:serve", "Serve a model with its adapters on this machine."),
    Target("gateway", "polygraft.cli.gateway:gateway", "The HTTP half alone, for many machines."),
    Target("worker", "polygraft.cli.worker:worker", "The computing half alone, for many machines."),
    Target("db", "polygraft.cli.db:app", "The registry database's schema."),
    Target("tenant", "polygraft.cli.tenant:app", "Who may have adapters and keys."),
    Target("key", "polygraft.cli.key:app", "What tenants call with."),
    Target("adapter", "polygraft.cli.adapter:app", "A tenant's adapters: push, list, roll back, share, pull."),
    Target("audit", "polygraft.cli.audit:audit", "Who did what to which object, from where, when."),
    Target("chat", "polygraft.cli.chat:chat", "Talk to a running server."),
    Target("bench", "polygraft.cli.bench:bench", "Load a running server and measure it."),
    Target("models", "polygraft.cli.models:models", "The model architectures that can be served."),
    Target("demo-model", "polygraft.cli.demo_model:demo_model", "Put the demo model into a folder."),
)


class _Polygraft(LazyGroup):
    targets = COMMANDS


app = typer.Typer(
    cls=_Polygraft,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version("polygraft"))
        raise typer.Exit


@app.callback()
def polygraft(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """One base language model, many tenants' LoRA adapters, one batched engine.

    Every option of serve, gateway and worker can also be set as POLYGRAFT_<OPTION> in the environment.
    """


def main() -> None:
    """The entry point. Exit codes: 0 done, 1 failed, 2 wrong usage; 78 of gateway and worker: no restart helps."""
    try:
        app()
    except SystemExit as ended:
        if not isinstance(ended.code, int):
            raise
        # Everything has been closed by now; an interpreter with this much in it takes a second to be taken apart.
        with suppress(BrokenPipeError):
            sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ended.code)
