"""The operator's routes: of a server, or of a database while no server runs on it."""

from __future__ import annotations

import importlib
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer

from polygraft import settings
from polygraft.cli.connect import AdminKey, Url, telling
from polygraft.cli.remote import DEFAULT_URL, Remote
from polygraft.errors import OptionError
from polygraft.lock import InUseError
from polygraft.settings import Settings

DataDir = Annotated[
    Path | None, typer.Option(help="Without --url: work on this folder's database while no server runs on it.")
]
DatabaseUrl = Annotated[str | None, typer.Option(help="Work on this database, without a server.")]


@contextmanager
def operator(
    url: Url = None, admin_key: AdminKey = None, data_dir: DataDir = None, database_url: DatabaseUrl = None
) -> Generator[Remote, None, None]:
    """The operator's routes: of the server at --url; else, while no server runs on the data folder that is told or
    lies here, straight on its database; else of the server at the usual address. Raises ConfigError.
    """
    options = settings.load(data_dir=data_dir, database_url=database_url)
    with ExitStack() as stack:
        transport = None
        if _on_database(url, options, told=data_dir is not None or database_url is not None):
            # The web framework and the database's are a second to import, which calls over HTTP can do without.
            local = importlib.import_module("polygraft.cli.local")
            # A server that has the data folder to itself does the same for whoever holds an operator's key.
            with suppress(InUseError):
                transport = stack.enter_context(local.local_operator(options))
        if transport is None and admin_key is None:
            raise OptionError("which operator's key? --admin-key or POLYGRAFT_ADMIN_KEY")
        where = DEFAULT_URL if url is None else url
        yield stack.enter_context(telling(Remote(where, admin_key, transport=transport)))


def _on_database(url: str | None, options: Settings, *, told: bool) -> bool:
    """Whether to work without a server if there is none: the command line says where, or else --url does not."""
    known = not {"data_dir", "database_url"}.isdisjoint(options.model_fields_set)
    return told or (url is None and (known or options.data_dir.is_dir()))
