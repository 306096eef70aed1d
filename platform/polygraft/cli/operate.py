"""The operator's routes: of a server, or straight on a database."""

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
    Path | None, typer.Option(help="Without --url: work on this folder's database, also while a server runs on it.")
]
DatabaseUrl = Annotated[str | None, typer.Option(help="Work on this database, without a server.")]


@contextmanager
def operator(
    url: Url = None, admin_key: AdminKey = None, data_dir: DataDir = None, database_url: DatabaseUrl = None
) -> Generator[Remote, None, None]:
    """The operator's routes: straight on the database of the data folder that is told or lies here; while a server runs
    on that folder, of the server at --url; without one, of the server at the usual address unless the command line
    tells the folder, which need not be that server's. Raises ConfigError.
    """
    told = data_dir is not None or database_url is not None
    options = settings.load(data_dir=data_dir, database_url=database_url)
    with ExitStack() as stack:
        transport = None
        if _on_database(url, options, told=told):
            # The web framework and the database's are a second to import, which calls over HTTP can do without.
            local = importlib.import_module("polygraft.cli.local")
            # A server that has the data folder does the same for whoever holds an operator's key, and at once.
            with suppress(InUseError):
                transport = stack.enter_context(local.local_operator(options, beside_server=told and url is None))
        if transport is None and admin_key is None:
            raise OptionError("which operator's key? --admin-key or POLYGRAFT_ADMIN_KEY")
        where = DEFAULT_URL if url is None else url
        yield stack.enter_context(telling(Remote(where, admin_key, transport=transport)))


def _on_database(url: str | None, options: Settings, *, told: bool) -> bool:
    """Whether to work without a server if there is none: the command line says where, or else --url does not."""
    known = not {"data_dir", "database_url"}.isdisjoint(options.model_fields_set)
    return told or (url is None and (known or options.data_dir.is_dir()))
