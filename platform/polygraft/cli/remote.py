"""A Polygraft server as the commands see it: calls that return JSON, listings, and errors in the server's own words."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import httpx

from polygraft.cli.show import printable
from polygraft.errors import OptionError, PolygraftError, error_body

DEFAULT_URL = "http://127.0.0.1:8000"
PAGE = 100
TIMEOUT = httpx.Timeout(60.0, connect=10.0)

Json = dict[str, Any]


class RemoteError(PolygraftError):
    """The server refused (`status`), or was not reached (None). The message is one line for the person at the
    terminal; `problems` are what an adapter's check found wrong. What the server says of a request that is wrong in
    itself (400) is wrong usage.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        type: str = "failed",
        param: str | None = None,
        code: str | None = None,
        problems: Iterable[Mapping[str, Any]] = (),
        retry_after: float | None = None,
    ) -> None:
        told = printable(message)
        super().__init__(told if code is None else f"{told} ({printable(code)})")
        self.message = message
        self.status = status
        self.type = type
        self.param = param
        self.code = code
        self.problems = tuple(problems)
        self.retry_after = retry_after
        """Seconds after which the server thinks that the same call would pass."""
        self.exit_code = 2 if status == 400 and type == "invalid_request_error" else 1

    @property
    def passing(self) -> bool:
        """Whether the same call may well work a little later."""
        return self.status is None or self.status >= 500 or self.status == 429

    def body(self) -> Json:
        """As the server told it."""
        body = error_body(self.message, self.type, param=self.param, code=self.code)
        if self.problems:
            body["error"]["errors"] = list(self.problems)
        return body


def server_url(text: str) -> str:
    """The address of a server, without the /v1 in which that of clients of OpenAI's API ends. Raises OptionError for
    what cannot be one.
    """
    try:
        url = httpx.URL(text.rstrip("/").removesuffix("/v1"))
    except (httpx.InvalidURL, ValueError) as error:
        raise OptionError(f"{text} is no address of a server: {error}") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise OptionError(f"{text} is no address of a server; write it like {DEFAULT_URL}")
    return str(url)


def authorization(key: str | None) -> dict[str, str]:
    """The header that shows `key`, if there is one. Raises OptionError for what cannot be a key."""
    if key is None:
        return {}
    if not (key and key.isascii() and key.isprintable() and " " not in key):
        raise OptionError("the key is empty or holds characters that no key has")
    return {"Authorization": f"Bearer {key}"}


def path_of(*parts: object) -> str:
    """A path of these parts, whatever characters they hold: `path_of("v1", "adapters", name)`."""
    return "".join(f"/{quote(str(part), safe='')}" for part in parts)


class Remote:
    """One server and one key. Close it after use."""

    def __init__(self, url: str, key: str | None, *, transport: httpx.BaseTransport | None = None) -> None:
        """Raises OptionError for an address or a key that cannot be one."""
        self.url = server_url(url)
        self._http = httpx.Client(
            base_url=self.url, headers=authorization(key), timeout=TIMEOUT, trust_env=False, transport=transport
        )

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def call(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, object] | None = None,
        json: Json | None = None,
        content: Iterable[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Json:
        """The JSON object that the server answers; empty for an answer without a body. Raises RemoteError."""
        with self._reaching():
            answer = self._http.request(
                method, path, params=_given(params), json=json, content=content, headers=headers
            )
        if not answer.is_success:
            raise _refusal(answer)
        if not answer.content:
            return {}
        return self._object(answer)

    def listed(self, path: str, limit: int | None = None, **params: object) -> list[Json]:
        """The objects of a listing, all or the first `limit`, page by page. Raises RemoteError."""
        found: list[Json] = []
        after: str | None = None
        while limit is None or len(found) < limit:
            size = PAGE if limit is None else min(PAGE, limit - len(found))
            answer = self.call("GET", path, params={**params, "limit": size, "after": after})
            try:
                found += answer["data"]
                after, more = answer["last_id"], answer["has_more"]
            except (KeyError, TypeError):
                raise self._stranger() from None
            if not more or after is None:
                break
        return found

    @contextmanager
    def stream(self, path: str) -> Generator[Iterator[bytes], None, None]:
        """The body of a GET as it comes. Raises RemoteError, while the body is read too."""
        with self._reaching(), self._http.stream("GET", path) as answer:
            if not answer.is_success:
                answer.read()
                raise _refusal(answer)
            yield answer.iter_raw()

    @contextmanager
    def _reaching(self) -> Generator[None, None, None]:
        try:
            yield
        except httpx.TimeoutException:
            raise RemoteError(f"{self.url} does not answer in time") from None
        except httpx.ConnectError as error:
            raise RemoteError(f"no server answers at {self.url}: {error}") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            told = str(error) if str(error) else type(error).__name__
            raise RemoteError(f"the connection to {self.url} failed: {told}") from None

    def _object(self, answer: httpx.Response) -> Json:
        try:
            body = answer.json()
        except ValueError:
            raise self._stranger() from None
        if not isinstance(body, dict):
            raise self._stranger()
        return body

    def _stranger(self) -> RemoteError:
        # Whatever answers there will not become a Polygraft server by being asked again, so it is a refusal.
        return RemoteError(f"{self.url} is not a Polygraft server: it answers otherwise", status=400)


def _given(params: Mapping[str, object] | None) -> dict[str, str] | None:
    return None if params is None else {name: str(value) for name, value in params.items() if value is not None}


def _refusal(answer: httpx.Response) -> RemoteError:
    try:
        error = answer.json()["error"]
        message, problems = str(error["message"]), error.get("errors")
    except (ValueError, KeyError, TypeError, AttributeError):
        return RemoteError(f"the server answered {answer.status_code}", status=answer.status_code)
    return RemoteError(
        message,
        status=answer.status_code,
        type=str(error.get("type", RemoteError.type)),
        param=error.get("param"),
        code=error.get("code"),
        problems=[problem for problem in problems if isinstance(problem, dict)] if isinstance(problems, list) else (),
        retry_after=_seconds(answer.headers.get("retry-after")),
    )


def _seconds(text: str | None) -> float | None:
    return float(text) if text is not None and text.isascii() and text.isdigit() else None
