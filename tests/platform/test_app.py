"""The application as a whole: who gets in, what is logged, what an answer carries. The queue and engine are fakes."""

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import structlog
from sqlalchemy.exc import OperationalError

from polygraft.app import create_app
from polygraft.blobs import BlobUnavailable
from polygraft.db import Database
from polygraft.health import Health
from polygraft.metrics import Metrics
from polygraft.openai.catalog import ModelCatalog
from polygraft.openai.inference import Inference
from polygraft.openai.routes import build_router
from polygraft.registry.live import LiveModels
from polygraft.registry.service import Registry
from polygraft.tenancy.access import AccessPolicy, KeyPolicy, OpenPolicy
from polygraft.tenancy.admissions import Admissions
from polygraft.tenancy.bootstrap import bootstrap
from polygraft.tenancy.keys import KeyHasher
from polygraft.tenancy.principal import TENANT_SCOPES, Principal
from polygraft.tenancy.service import Authenticator

KEY, ADMIN_KEY = "the-tenants-key", "the-admins-key"


class Parts:
    """An application over a real database, with everything that a test may want to disturb."""

    def __init__(self, database: Database, directory: Any, policy: AccessPolicy) -> None:
        self.live = LiveModels(directory)
        self.registry = Registry(database, self.live)
        self.registry.complete = True
        self.health = Health(self.live, self.registry, database.ping)
        self.metrics = Metrics(self.live)
        self.inference = Inference(
            queue=directory,
            resolver=self.registry,
            catalog=ModelCatalog(
                lambda: self.live.now.cards, lambda digest: pytest.fail(f"no blob {digest} is needed")
            ),
            gateway_id="gw",
            observer=self.metrics,
        )
        self.admissions = Admissions()
        self.app = create_app([build_router(self.inference)], self.health, policy, self.admissions, self.metrics)

    def client(self, app: Any = None, base_url: str = "http://127.0.0.1") -> httpx.AsyncClient:
        transport = httpx.ASGITransport(self.app if app is None else app)
        return httpx.AsyncClient(transport=transport, base_url=base_url)


@pytest.fixture
async def keys(database: Database) -> tuple[KeyPolicy, str]:
    hasher = KeyHasher(b"p" * 32)
    first = await bootstrap(database, hasher, admin_key=ADMIN_KEY, tenant_key=KEY)
    return KeyPolicy(Authenticator(database, hasher)), first.tenant_id


@pytest.fixture
async def parts(database: Database, directory: Any, keys: tuple[KeyPolicy, str]) -> AsyncIterator[Parts]:
    parts = Parts(database, directory, keys[0])
    await parts.live.refresh()
    yield parts
    parts.inference.close()


@pytest.fixture
async def client(parts: Parts) -> AsyncIterator[httpx.AsyncClient]:
    async with parts.client() as client:
        yield client


@pytest.fixture
async def open_client(
    database: Database, directory: Any, keys: tuple[KeyPolicy, str]
) -> AsyncIterator[httpx.AsyncClient]:
    """With `--auth none`."""
    anybody = Principal(key_id="none", tenant_id=keys[1], tenant_name="default", scopes=TENANT_SCOPES)
    parts = Parts(database, directory, OpenPolicy(anybody, keys[0]))
    await parts.live.refresh()
    async with parts.client() as client:
        yield client
    parts.inference.close()


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    "path",
    ["/", "/nope", "/docs", "/redoc", "/metrics", "/admin/v1/tenants", "/health", "/health/live/", "//health/live",
     "/HEALTH/LIVE", "/health/live/../../v1/models", "/openapi.json/", "/v1/models?x=/health/live"],
)  # fmt: skip
async def test_whatever_is_not_listed_wants_a_key(client: httpx.AsyncClient, path: str) -> None:
    assert (await client.get(path)).status_code == 401


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": ""}, {"Authorization": "Bearer"}, {"Authorization": f"Basic {KEY}"},
     {"Authorization": "Bearer pg-secretsecret"}, {"api-key": KEY}, {"Authorization": KEY}],
)  # fmt: skip
async def test_a_key_that_does_not_work_is_never_repeated(client: httpx.AsyncClient, headers: dict[str, str]) -> None:
    answer = await client.get(f"/v1/models?key={KEY}", headers=headers)
    assert answer.status_code == 401
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    assert "secret" not in answer.text
    assert KEY not in answer.text


@pytest.mark.parametrize(
    "told",
    [
        [f"Bearer {KEY}", f"Bearer {KEY}"],
        [f"Bearer {KEY}", "Bearer other"],
        ["Bearer other", f"Bearer {KEY}"],
        ["Basic dTpw", f"Bearer {KEY}"],
        ["", f"Bearer {KEY}"],
        [f"Bearer {KEY}, Bearer other"],
        [f"Bearer other,bearer {KEY}"],
        [f"Basic dTpw, Bearer {KEY}"],
    ],
)
async def test_of_several_keys_none_counts(client: httpx.AsyncClient, told: list[str]) -> None:
    answer = await client.get("/v1/models", headers=[("Authorization", one) for one in told])
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    error = answer.json()["error"]
    assert (error["code"], error["message"]) == (
        "invalid_api_key",
        "The request holds several Authorization headers; send one.",
    )


async def test_a_refused_request_is_answered_before_its_body_is_read(parts: Parts) -> None:
    sent: list[dict[str, Any]] = []

    async def receive() -> Any:
        pytest.fail("the body was read")

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": "/v1/chat/completions", "raw_path": b"/v1/chat/completions",
        "query_string": b"", "headers": [], "http_version": "1.1", "scheme": "http",
    }  # fmt: skip
    await parts.app(scope, receive, send)
    assert sent[0]["status"] == 401


async def test_keys_open_what_their_scopes_say(client: httpx.AsyncClient) -> None:
    assert (await client.get("/v1/models", headers=bearer(KEY))).status_code == 200
    for path, key in (("/v1/models", ADMIN_KEY), ("/admin/v1/tenants", KEY)):
        refused = await client.get(path, headers=bearer(key))
        assert refused.status_code == 403
        assert refused.json()["error"]["type"] == "permission_error"
        assert refused.json()["error"]["code"] == "insufficient_scope"
    assert (await client.get("/admin/v1/tenants", headers=bearer(ADMIN_KEY))).status_code == 404


async def test_web_sockets_are_refused(parts: Parts) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await parts.app(
        {"type": "websocket", "path": "/health/live", "headers": []}, lambda: pytest.fail("nothing is read"), send
    )
    assert sent == [{"type": "websocket.close", "code": 1008}]


async def test_without_auth_any_key_or_none_is_the_default_tenant(open_client: httpx.AsyncClient) -> None:
    for headers in ({}, bearer("whatever"), {"Authorization": "nonsense"}):
        assert (await open_client.get("/v1/models", headers=headers)).status_code == 200
    assert (await open_client.get("/admin/v1/tenants")).status_code == 401
    assert (await open_client.get("/admin/v1/tenants", headers=bearer(KEY))).status_code == 403
    assert (await open_client.get("/admin/v1/tenants", headers=bearer(ADMIN_KEY))).status_code == 404


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]", "[::1]:8000"])
async def test_without_auth_loopback_hosts_are_served(open_client: httpx.AsyncClient, host: str) -> None:
    assert (await open_client.get("/v1/models", headers={"Host": host})).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example:80", "", "[::2]", "localhost@evil"]
)
async def test_without_auth_other_hosts_are_refused(open_client: httpx.AsyncClient, host: str) -> None:
    for path in ("/v1/models", "/health/ready", "/admin/v1/tenants"):
        refused = await open_client.get(path, headers={"Host": host, **bearer(ADMIN_KEY)})
        assert refused.status_code == 403
        assert refused.json()["error"]["code"] == "host_not_allowed"


async def test_every_answer_has_an_id_of_the_servers_own(client: httpx.AsyncClient) -> None:
    ids = set()
    for path, key in (("/v1/models", KEY), ("/v1/models", "wrong"), ("/nope", KEY), ("/health/live", "")):
        for _ in range(2):
            answer = await client.get(path, headers={"X-Request-Id": "same", **bearer(key)})
            ids.add(answer.headers["x-request-id"])
    assert len(ids) == 8
    assert all(re.fullmatch(r"req_[0-9a-f]{32}", value) for value in ids)


async def test_a_clients_id_is_logged_bounded_and_plain(client: httpx.AsyncClient) -> None:
    with structlog.testing.capture_logs() as logs:
        await client.get("/v1/models", headers={"X-Request-Id": "a b\x7f" + "x" * 10_000, **bearer(KEY)})
    assert logs[-1]["client_request_id"] == ("a?b?" + "x" * 60)


async def test_one_line_per_request_without_prompts_and_keys(client: httpx.AsyncClient) -> None:
    body = {"model": "SECRET-model", "messages": [{"role": "user", "content": "SECRET-prompt"}]}
    with structlog.testing.capture_logs(processors=[structlog.contextvars.merge_contextvars]) as logs:
        answer = await client.post("/v1/chat/completions?q=SECRET", json=body, headers=bearer(KEY))
        await client.get("/SECRET/path", headers=bearer(KEY))
        await client.get("/v1/models/base", headers=bearer(KEY))
    assert [line["event"] for line in logs] == ["request"] * 3
    assert "SECRET" not in json.dumps(logs, default=repr)
    assert KEY not in json.dumps(logs, default=repr)
    chat, unknown, model = logs
    assert (chat["method"], chat["path"], chat["status"]) == ("POST", "/v1/chat/completions", 404)
    assert chat["tenant"].startswith("ten_")
    assert chat["ms"] >= 0
    assert chat["request_id"] == answer.headers["x-request-id"]
    assert unknown["path"] is None
    assert (model["path"], model["model"], model["status"]) == ("/v1/models/{name:path}", "base", 200)
    assert "model" not in chat


async def test_an_unknown_model_is_404_and_harms_nobody(client: httpx.AsyncClient) -> None:
    body = {"model": "nope", "messages": [{"role": "user", "content": "hi"}]}
    for stream in (False, True):
        answer = await client.post("/v1/chat/completions", json={**body, "stream": stream}, headers=bearer(KEY))
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "model_not_found"
        assert answer.json()["error"]["param"] == "model"
    assert (await client.get("/v1/models", headers=bearer(KEY))).status_code == 200


async def test_requests_while_the_model_loads_are_503_with_retry_after(
    parts: Parts, client: httpx.AsyncClient, directory: Any
) -> None:
    directory.live, directory.known = [], {}
    await parts.live.refresh()
    body = {"model": "base", "messages": [{"role": "user", "content": "hi"}]}
    answer = await client.post("/v1/chat/completions", json=body, headers=bearer(KEY))
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["type"] == "service_unavailable_error"


async def test_database_trouble_is_503_for_a_known_key(
    parts: Parts, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: Any) -> None:
        raise OperationalError("SELECT", {}, Exception("database is locked"))

    assert (await client.get("/v1/models", headers=bearer(KEY))).status_code == 200
    monkeypatch.setattr(parts.registry, "list_models", broken)
    answer = await client.get("/v1/models", headers=bearer(KEY))
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "dependency_unavailable")
    assert "locked" not in answer.text


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OperationalError("SELECT", {"key": KEY}, Exception("database is locked")), "database is locked"),
        (BlobUnavailable("the bucket is away"), "the bucket is away"),
    ],
)
async def test_what_a_dependency_said_is_in_the_log_and_nowhere_else(
    parts: Parts, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, error: Exception, told: str
) -> None:
    async def broken(*_: Any) -> None:
        raise error

    monkeypatch.setattr(parts.registry, "list_models", broken)
    with structlog.testing.capture_logs() as lines:
        answer = await client.get("/v1/models", headers=bearer(KEY))
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "dependency_unavailable")
    assert told not in answer.text
    assert [line["error"] for line in lines if line["event"] == "dependency_failed"] == [told]
    assert KEY not in str(lines)


async def test_a_bug_is_a_500_without_details(
    parts: Parts, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: Any) -> None:
        raise ZeroDivisionError("SECRET")

    monkeypatch.setattr(parts.registry, "list_models", broken)
    with structlog.testing.capture_logs() as logs:
        answer = await client.get("/v1/models", headers=bearer(KEY))
    assert answer.status_code == 500
    assert "x-request-id" in answer.headers
    assert answer.json()["error"]["type"] == "server_error"
    assert "SECRET" not in answer.text
    assert [line["event"] for line in logs] == ["request_failed", "request"]


async def test_the_metrics_are_on_their_own_listener(parts: Parts, client: httpx.AsyncClient, directory: Any) -> None:
    await client.get("/v1/models", headers=bearer(KEY))
    await client.get("/v1/models", headers=bearer("wrong"))
    directory.worker(prefix_cache_hits_total=7.0)
    await parts.live.refresh()
    parts.metrics.added_latency(0.002)
    parts.metrics.tokens("base", 10, 4, 6)
    parts.metrics.outcome("base", 200)
    assert (await client.get("/metrics", headers=bearer(KEY))).status_code == 404
    async with parts.client(parts.metrics.app()) as scraper:
        text = (await scraper.get("/metrics", follow_redirects=True)).text
    for line in (
        'polygraft_http_responses_total{status="200"} 1.0',
        'polygraft_http_responses_total{status="401"} 1.0',
        'polygraft_refusals_total{reason="invalid_api_key",status="401"} 1.0',
        'polygraft_refusals_total{reason="not_found",status="404"} 1.0',
        'polygraft_adapter_load_seconds_bucket{le="0.05",model="base"} 1.0',
        'polygraft_adapter_load_seconds_bucket{le="+Inf",model="base"} 2.0',
        'polygraft_adapter_load_seconds_sum{model="base"} 0.3',
        'polygraft_requests_total{model="base",status="200"} 1.0',
        'polygraft_added_latency_seconds_bucket{le="0.002"} 1.0',
        'polygraft_cached_prompt_tokens_total{model="base"} 4.0',
        "polygraft_queue_depth 3.0",
        'polygraft_workers{model="base",state="ready"} 1.0',
        'polygraft_requests_running{model="base"} 2.0',
        'polygraft_kv_blocks_free{model="base"} 6.0',
        'polygraft_step_seconds_total{model="base",phase="forward"} 0.4',
        'polygraft_adapters_resident{model="base"} 1.0',
        'polygraft_prefix_cache_hits_total{model="base"} 7.0',
    ):
        assert line in text.splitlines(), line
    assert KEY not in text
