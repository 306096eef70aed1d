"""Commands that are imported when they run, and how they fail."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, ClassVar, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import TyperException

from polygraft.errors import PolygraftError, error_body


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
    """A group of `targets`, and the one place where commands fail: with one line on stderr or, for programs, which ask
    for --json, with one JSON document on stdout in the shape of the API's errors.
    """

    targets: ClassVar[Sequence[Target]] = ()

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for target in self.targets:
            self.add_command(_LazyCommand(target))

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> NoReturn:
        """Run the command that was asked for, and end the process: 0 done, 1 failed, 2 wrong usage."""
        words = sys.argv[1:] if args is None else list(args)
        # Looked for by hand: what cannot be parsed has to be told in the right form too.
        as_json = "--json" in takewhile(lambda word: word != "--", words)
        try:
            code = super().main(
                words, prog_name, complete_var, standalone_mode and not as_json, windows_expand_args, **extra
            )
        except PolygraftError as error:
            if as_json:
                _fail(error.exit_code, error.body())
            typer.echo(f"error: {error}", err=True)
            sys.exit(error.exit_code)
        except TyperException as error:
            _fail(error.exit_code, error_body(error.format_message(), "invalid_request_error", param=_param(error)))
        except typer.Abort:
            _fail(1, error_body("aborted", "failed"))
        sys.exit(0 if code is None else code)


def _fail(code: int, body: dict[str, Any]) -> NoReturn:
    typer.echo(json.dumps(body, indent=2))
    sys.exit(code)


def _param(error: TyperException) -> str | None:
    """The option or argument that the complaint is about."""
    if not isinstance(error, typer.BadParameter) or error.param is None:
        return None
    return error.param.opts[0]
