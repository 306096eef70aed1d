"""`--adapter NAME=PATH`: read strictly, so that a slip of the shell never becomes part of a name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from polygraft.errors import ConfigError

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
ROUTES = frozenset({"uploads", "import"})
"""What stands beside the adapters' names below /v1/adapters."""
OPTION = "option"
"""The source of versions that came in this way."""
SYNTAX = "write --adapter NAME=PATH, once for each adapter"
_ANOTHER = re.compile(r"\s(\S+)=")


@dataclass(frozen=True, slots=True)
class AdapterOption:
    """A name and the PEFT folder that it stands for."""

    name: str
    path: Path


def clash(name: str, base_model: str) -> bool:
    """Whether the two names could be taken for one another: equal but for case and surrounding blanks."""
    return name.strip().casefold() == base_model.strip().casefold()


def parse_adapter_options(options: Sequence[str], base_model: str) -> tuple[AdapterOption, ...]:
    """Every option as a name and an existing path, `~` expanded. Splits at the first `=`.

    Raises ConfigError with each bad option, what is wrong with it and the accepted syntax.
    """
    parsed: list[AdapterOption] = []
    problems: list[str] = []
    for option in options:
        found = _parse(option, base_model)
        if isinstance(found, str):
            problems.append(f"--adapter {option!r}: {found}")
        elif any(found.name == other.name for other in parsed):
            problems.append(f"--adapter {option!r}: the name {found.name!r} is given twice")
        else:
            parsed.append(found)
    if problems:
        raise ConfigError("; ".join(problems) + f" ({SYNTAX})")
    return tuple(parsed)


def _parse(option: str, base_model: str) -> AdapterOption | str:
    """The adapter, or what is wrong with the option."""
    if option.lstrip().startswith(("{", "[")):
        return "JSON is not understood here"
    name, equals, path = option.partition("=")
    if not equals:
        return "there is no `=` in it"
    if not name:
        return "the name before `=` is missing"
    if clash(name, base_model):
        return f"the name {name!r} clashes with the base model {base_model!r}"
    if not NAME.fullmatch(name):
        return f"the name {name!r} is not made of a-z, 0-9, `.`, `_`, `-` (up to 64, the first a letter or digit)"
    if name in ROUTES:
        return f"the name {name!r} is that of a route"
    if not path:
        return "the path after `=` is missing"
    folder = Path(path).expanduser()
    if folder.exists():
        return AdapterOption(name, folder)
    if another := _ANOTHER.search(path):
        return f"the path {path!r} does not exist; is {another[1]!r} a second adapter?"
    return f"the path {str(folder)!r} does not exist"
