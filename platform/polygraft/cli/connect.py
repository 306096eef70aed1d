"""Which server, whose key, whose adapters: the options that the commands about adapters and tenants share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from polygraft.cli import show
from polygraft.cli.remote import DEFAULT_URL, Remote, RemoteError, path_of
from polygraft.errors import OptionError

_VISIBLE = "Better in the environment: other users of a machine see command lines."

Url = Annotated[
    str | None, typer.Option(envvar="POLYGRAFT_URL", show_default=False, help=f"The server. Default: {DEFAULT_URL}.")
]
Key = Annotated[str | None, typer.Option(envvar="POLYGRAFT_API_KEY", help=f"A tenant's key. {_VISIBLE}")]
AdminKey = Annotated[str | None, typer.Option(envvar="POLYGRAFT_ADMIN_KEY", help=f"An operator's key. {_VISIBLE}")]
OfTenant = Annotated[str | None, typer.Option("--tenant", help="Act on this tenant's adapters, with the admin key.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


@dataclass(frozen=True, slots=True)
class Adapters:
    """The adapters of one tenant on one server."""

    remote: Remote
    root: str

    def path(self, *parts: object) -> str:
        """Of an adapter, or of something below it."""
        return self.root + path_of(*parts)


@contextmanager
def adapters(
    url: Url = None, key: Key = None, tenant: OfTenant = None, admin_key: AdminKey = None
) -> Generator[Adapters, None, None]:
    """The key's own tenant's, or with --tenant those of any. Raises OptionError."""
    where = DEFAULT_URL if url is None else url
    if tenant is not None and admin_key is None:
        raise OptionError("--tenant needs an operator's key: --admin-key or POLYGRAFT_ADMIN_KEY")
    with telling(Remote(where, key if tenant is None else admin_key)) as remote:
        root = "/v1/adapters" if tenant is None else path_of("admin", "v1", "tenants", tenant, "adapters")
        try:
            yield Adapters(remote, root)
        except RemoteError as error:
            # Not known before: a server with --auth none wants no key.
            if error.status == 401 and tenant is None and key is None:
                raise OptionError("which key? --key or POLYGRAFT_API_KEY") from None
            raise


def command_on(
    provider: Callable[..., AbstractContextManager[Any]],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make `command(provided, ...)` a typer function that has the provider's options beside its own parameters."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
        shared = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in inspect.signature(provider, eval_str=True).parameters.values()
        ]

        def run(**given: Any) -> None:
            with provider(**{parameter.name: given.pop(parameter.name) for parameter in shared}) as provided:
                command(provided, **given)

        parameters = [*own, *shared]
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


@contextmanager
def telling(remote: Remote) -> Generator[Remote, None, None]:
    """`remote` for as long as the block runs; what it finds wrong with an adapter is shown before the error is."""
    try:
        yield remote
    except RemoteError as error:
        if error.problems:
            show.problems(error.problems)
        raise
    finally:
        remote.close()
