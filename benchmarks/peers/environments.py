"""A virtual environment for each peer, made once and kept in .cache/peers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from rich.console import Console

from .errors import PeerError, tail

ROOT = Path(__file__).resolve().parent.parent.parent
PEERS = ROOT / ".cache" / "peers"
_READY = "ready.json"


def environment(
    name: str,
    packages: Sequence[str],
    unwanted: Sequence[str] = (),
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Path:
    """The folder of a virtual environment that holds `packages` and none of the `unwanted` ones.

    `variables` are set while pip runs. Raises PeerError with pip's last lines where it fails.
    """
    folder = PEERS / name
    wanted = json.dumps({"packages": list(packages), "unwanted": list(unwanted), "variables": dict(variables)})
    ready = folder / _READY
    if ready.exists() and ready.read_text() == wanted:
        return folder
    log = PEERS / f"{name}-install.log"
    with Console(stderr=True).status(f"installing {', '.join(packages)} into {folder} (log: {log})"):
        venv.create(folder, with_pip=True, clear=True)
        log.write_text("")
        _pip(folder, log, ["install", *packages], variables)
        if unwanted:
            _pip(folder, log, ["uninstall", "--yes", *unwanted], {})
    ready.write_text(wanted)
    return folder


def python(folder: Path) -> Path:
    """The environment's interpreter."""
    return folder / "bin" / "python"


def site_packages(folder: Path) -> Path:
    """Where the environment's packages lie."""
    return folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def _pip(folder: Path, log: Path, arguments: Sequence[str], variables: Mapping[str, str]) -> None:
    with log.open("ab") as out:
        done = subprocess.run(
            [python(folder), "-m", "pip", *arguments],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **variables},
            check=False,
        )
    if done.returncode != 0:
        raise PeerError(f"pip {arguments[0]} failed in {folder}; the end of {log}:\n{tail(log)}")
