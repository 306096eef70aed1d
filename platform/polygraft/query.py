"""Query parameters that a route does not have."""

from __future__ import annotations

from fastapi import Request
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from polygraft.errors import bad_request, shortened


async def known_query(request: Request) -> None:
    """A FastAPI dependency: raises ApiError 400 for a parameter that the route does not declare, because a filter that
    is misspelled would be taken for none.
    """
    route = request.scope["route"]
    assert isinstance(route, APIRoute)
    declared = _declared(route.dependant)
    for name in request.query_params:
        if name not in declared:
            known = ", ".join(f"`{one}`" for one in sorted(declared))
            told = f"it takes {known}" if known else "it takes none"
            raise bad_request(
                f"`{shortened(name)}` is no query parameter of this route; {told}.", param=shortened(name)
            )


def _declared(dependant: Dependant) -> set[str]:
    """The names in the signature of a route or of a dependency, and of those that it has."""
    names = {field.alias for field in dependant.query_params}
    return names.union(*(_declared(one) for one in dependant.dependencies))
