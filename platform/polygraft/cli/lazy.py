"""Commands that are imported when they run."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

from polygraft.errors import OptionError, PolygraftError


@dataclass(frozen=True, slots=True)
class Target:
    """A command's name, where it is (`module:attribute`, a function or a Typer), and its line in the help."""

    name: str
    where: str
    summary: str


class _LazyCommand(TyperCommand):
    """Stands in for a command in listings; becomes the command when it is run."""

    def __init__(self, target: Target) -> None:
        super().__init__(target.name, help=target.summary)
        self._where = target.where

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """The context of the real command."""
        module, _, attribute = self._where.partition(":")
        found = getattr(importlib.import_module(module), attribute)
        if not isinstance(found, typer.Typer):
            # Plain help: rich's columns cut the longer options' names off on a terminal of 80 characters.
            single = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
            single.command(self.name)(found)
            found = single
        return typer.main.get_command(found).make_context(info_name, args, parent, **extra)


class LazyGroup(TyperGroup):
    """A group of `targets`. What the operator can put right ends with one line on stderr and exit code 1, a malformed
    option with 2.
    """

    targets: ClassVar[Sequence[Target]] = ()

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for target in self.targets:
            self.add_command(_LazyCommand(target))

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for."""
        try:
            return super().invoke(ctx)
        except PolygraftError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2 if isinstance(error, OptionError) else 1) from None
