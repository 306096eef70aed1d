"""The requests that were let in and are not answered yet, so that a revoked key's can be ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.types import Scope

from polygraft.errors import ApiError
from polygraft.queue.messages import AccessChange
from polygraft.tenancy.principal import Principal
from polygraft.tenancy.refusals import refusal

Ender = Callable[[ApiError], None]


class Admission:
    """One request. The middleware puts it into `scope["state"]["admission"]`."""

    def __init__(self, principal: Principal) -> None:
        self.principal = principal
        self._refusal: ApiError | None = None
        self._ender: Ender | None = None

    def require(self) -> None:
        """Raise the reason, an ApiError, if the caller may not go on any more."""
        if self._refusal is not None:
            raise self._refusal

    def when_ended(self, ender: Ender) -> None:
        """Have `ender` called with the reason once the caller may not go on: at once if that is so already."""
        self._ender = ender
        if self._refusal is not None:
            ender(self._refusal)

    def end(self, error: ApiError) -> None:
        """The caller may not go on. Only the first reason counts."""
        if self._refusal is not None:
            return
        self._refusal = error
        if self._ender is not None:
            self._ender(error)


def admission_of(scope: Scope) -> Admission:
    """The request's admission; only on routes that want a key."""
    admission = scope["state"]["admission"]
    assert isinstance(admission, Admission)
    return admission


class Admissions:
    """All of this gateway's."""

    def __init__(self) -> None:
        self._present: set[Admission] = set()

    @contextmanager
    def during(self, principal: Principal) -> Iterator[Admission]:
        """A request of `principal`, from here to the end of its answer."""
        admission = Admission(principal)
        self._present.add(admission)
        try:
            yield admission
        finally:
            self._present.discard(admission)

    def key_ids(self) -> set[str]:
        """The keys that requests are running with."""
        return {admission.principal.key_id for admission in self._present}

    def apply(self, change: AccessChange) -> None:
        """End the requests that `change` refuses."""
        if change.refusal is None:
            return
        for admission in list(self._present):
            if concerns(change, admission.principal):
                admission.end(refusal(change.refusal))


def concerns(change: AccessChange, principal: Principal) -> bool:
    """Whether `change` is about this caller."""
    return change.id == (principal.key_id if change.kind == "key" else principal.tenant_id)
