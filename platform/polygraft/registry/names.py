"""What a client may write as a model's name, and what adapters, versions and aliases may be called."""

from __future__ import annotations

import re
from dataclasses import dataclass

from polygraft.registry.options import NAME

_LIKE_A_VERSION = re.compile(r"v[0-9]+")
_MODEL = re.compile(
    # The owner is found by equality alone; printable ASCII is what a response header can tell.
    r"(?:(?P<owner>[!-.0-?A-~]{1,64})/)?"
    rf"(?P<adapter>{NAME.pattern})"
    rf"(?:@(?:v(?P<version>[1-9][0-9]{{0,8}})|(?P<alias>{NAME.pattern})))?"
)
NAME_RULE = "a-z, 0-9, `.`, `_` and `-`, at most 64 of them, the first a letter or a digit"


@dataclass(frozen=True, slots=True)
class AdapterName:
    """`adapter`, `adapter@v3` or `adapter@alias`, and each of them as `owner/…` where another tenant lends it."""

    owner: str | None
    adapter: str
    version: int | None
    alias: str | None


def is_adapter_name(text: str) -> bool:
    """Whether an adapter may be called so."""
    return NAME.fullmatch(text) is not None


def is_alias(text: str) -> bool:
    """Whether an alias may be called so: like an adapter, but never like a version."""
    return is_adapter_name(text) and _LIKE_A_VERSION.fullmatch(text) is None


def parse_adapter_name(text: str) -> AdapterName | None:
    """The parts of a model's name; None for what can be no adapter's."""
    found = _MODEL.fullmatch(text)
    if found is None:
        return None
    alias, version = found["alias"], found["version"]
    if alias is not None and not is_alias(alias):
        return None
    return AdapterName(found["owner"], found["adapter"], None if version is None else int(version), alias)


def without_version(name: str) -> str:
    """The model's name as a key's allow-list has it."""
    return name.partition("@")[0]
