"""The queue's Lua scripts. Every change of state is one script, so that a retried call changes nothing more."""

from __future__ import annotations

from importlib.resources import files

from polygraft.queue import keys

_FOLDER = files("polygraft.queue") / "lua"
_CONSTANTS = "\n".join(f"local {name} = '{value}'" for name, value in keys.NAMES.items())


def source(name: str) -> str:
    """The text of `lua/<name>.lua` after the names of the keys and what the scripts share."""
    parts = (_CONSTANTS, (_FOLDER / "common.lua").read_text(), (_FOLDER / f"{name}.lua").read_text())
    return "\n".join(parts)
