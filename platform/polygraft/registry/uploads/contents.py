"""Which of the files somebody sends are the adapter, wherever they come from: an archive, a repository, a bucket."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePosixPath

from polygraft_adapters.config import CONFIG_NAME
from polygraft_adapters.folder import MLX_WEIGHTS_NAME, WEIGHTS_NAME
from polygraft_adapters.types import AdapterError, Problem
from polygraft_adapters.wording import shown

README_NAME = "README.md"
"""Kept beside the adapter while it is checked: it tells which tool trained it."""
MAX_README = 64 * 1024
_WANTED = (CONFIG_NAME, WEIGHTS_NAME, MLX_WEIGHTS_NAME)
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_PICKLE_HINT = (
    "pickles can run code and are never opened; load the adapter with PEFT where you trust it and save it again with "
    "save_pretrained(..., safe_serialization=True)"
)
_LISTED = 5


def is_adapter_file(path: str) -> bool:
    """Whether a file of this name may be the adapter's config or weights."""
    return PurePosixPath(path).name in _WANTED


def is_readme(path: str) -> bool:
    """Whether a file of this name may be the adapter's model card."""
    return PurePosixPath(path).name == README_NAME and len(PurePosixPath(path).parts) <= 2


def choose(paths: Iterable[str]) -> dict[str, str]:
    """The adapter's files among `paths` (relative, "/" between the parts): name → path.

    Both lie at the top or in the same single folder below it. A README.md beside them comes along. Raises AdapterError
    with what is there instead.
    """
    names = list(paths)
    configs = [path for path in names if PurePosixPath(path).name == CONFIG_NAME]
    weights = [path for path in names if PurePosixPath(path).name == WEIGHTS_NAME]
    if not weights:
        weights = [path for path in names if PurePosixPath(path).name == MLX_WEIGHTS_NAME]
    problems = _one(CONFIG_NAME, configs, names)
    problems += _one(WEIGHTS_NAME, weights, names) if weights else [_without_weights(names)]
    if problems:
        raise AdapterError(problems)
    config, tensors = PurePosixPath(configs[0]), PurePosixPath(weights[0])
    if config.parent != tensors.parent:
        problem = f"is in another folder than {shown(str(tensors))}"
        raise AdapterError([Problem(shown(str(config)), problem, "PEFT saves both side by side")])
    if len(config.parts) > 2:
        hint = "pack the adapter's own folder, not those above it"
        raise AdapterError([Problem(shown(str(config)), "lies too deep: one folder above the files is allowed", hint)])
    chosen = {CONFIG_NAME: configs[0], tensors.name: weights[0]}
    for path in names:
        if PurePosixPath(path) == config.parent / README_NAME:
            chosen[README_NAME] = path
    return chosen


def _one(name: str, found: list[str], names: list[str]) -> list[Problem]:
    if len(found) == 1:
        return []
    if not found:
        return [_missing(name, names)]
    listed = ", ".join(map(shown, sorted(found)[:_LISTED]))
    return [Problem(name, f"is there {len(found)} times: {listed}", "send one adapter, without checkpoints")]


def _without_weights(names: list[str]) -> Problem:
    pickles = sorted(path for path in names if path.casefold().endswith(_PICKLES))
    if pickles:
        return Problem(WEIGHTS_NAME, f"not there, only {', '.join(map(shown, pickles[:_LISTED]))}", _PICKLE_HINT)
    others = sorted(path for path in names if path.endswith(".safetensors"))
    if others:
        listed = ", ".join(map(shown, others[:_LISTED]))
        return Problem(WEIGHTS_NAME, f"not there, only {listed}", f"rename the adapter's file {WEIGHTS_NAME}")
    return _missing(WEIGHTS_NAME, names)


def _missing(name: str, names: list[str]) -> Problem:
    """Says what is there instead."""
    listed = ", ".join(map(shown, sorted(names)[:_LISTED]))
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    problem = f"not there; what is there: {listed}{more}" if names else "not there: nothing is"
    return Problem(name, problem, "it lies in the folder that save_pretrained() wrote: send or name that one")
