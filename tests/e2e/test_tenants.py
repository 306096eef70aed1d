"""Two tenants on one server: each uploads, calls and manages its own, and sees nothing of the other's."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

import httpx
import openai
import pytest
from tests.e2e.server import Server
from tests.e2e.tenants import Operator, Tenant, served, zipped

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def operator(server: Server) -> Operator:
    return Operator(server)


@pytest.fixture(scope="module")
def acme(operator: Operator, demo_adapters: dict[str, Path]) -> Tenant:
    """A tenant with an adapter of its own."""
    tenant = operator.tenant("acme")
    tenant.pushed("support", demo_adapters["json"])
    return tenant


@pytest.fixture(scope="module")
def rival(operator: Operator) -> Tenant:
    return operator.tenant("rival")


def test_an_uploaded_adapter_is_called_by_its_name(acme: Tenant) -> None:
    answer = acme.openai().chat.completions.create(
        model="support",
        messages=[{"role": "user", "content": "What is the capital of Germany?"}],
        temperature=0,
        max_tokens=48,
    )
    assert json.loads(answer.choices[0].message.content).keys() == {"topic", "kind", "question"}
    shown = acme.shown("support")
    assert (shown["version"], shown["status"], shown["owned_by"]) == (1, "ready", "acme")
    assert shown["digest"].startswith("sha256:")


def test_another_tenant_neither_sees_nor_calls_it(acme: Tenant, rival: Tenant) -> None:
    assert "support" in acme.models()
    assert "support" not in rival.models()
    hidden, unknown = rival.chat("support"), rival.chat("nothing")
    assert hidden.status_code == unknown.status_code == 404
    assert hidden.text.replace("support", "nothing") == unknown.text
    for method, path in (
        ("GET", "/v1/adapters/support"),
        ("GET", "/v1/adapters/support/versions"),
        ("GET", "/v1/adapters/support/versions/1/content"),
        ("DELETE", "/v1/adapters/support"),
        ("GET", "/v1/models/support"),
    ):
        there, nowhere = rival.call(method, path), rival.call(method, path.replace("support", "nothing"))
        assert there.status_code == nowhere.status_code == 404
        assert there.text.replace("support", "nothing") == nowhere.text
    assert rival.call("GET", "/v1/adapters").json()["data"] == []
    with pytest.raises(openai.NotFoundError):
        rival.openai().models.retrieve("acme/support")


def test_the_same_content_under_two_tenants_is_stored_once_and_told_to_nobody(
    acme: Tenant, rival: Tenant, demo_adapters: dict[str, Path]
) -> None:
    mine = rival.push("mine", zipped(demo_adapters["json"]))
    assert mine.status_code == 201
    assert mine.json()["digest"] == acme.shown("support")["digest"]
    again = rival.push("mine", zipped(demo_adapters["json"]))
    assert (again.status_code, again.json()["version"]) == (200, 1)
    assert rival.call("DELETE", "/v1/adapters/mine").status_code == 200
    assert served(acme.chat("support"))[1] == "support@v1"


def test_versions_roll_back_and_aliases_split(acme: Tenant, demo_adapters: dict[str, Path]) -> None:
    acme.pushed("voice", demo_adapters["json"])
    first = served(acme.chat("voice"))
    second_version = acme.pushed("voice", demo_adapters["pirate"])
    assert second_version["version"] == 2
    second = served(acme.chat("voice"))
    assert (first[1], second[1]) == ("voice@v1", "voice@v2")
    assert first[0] != second[0]
    assert served(acme.chat("voice@v1")) == first
    assert acme.call("POST", "/v1/adapters/voice/rollback", json={"version": 1}).status_code == 200
    assert served(acme.chat("voice")) == first
    assert acme.call("PUT", "/v1/adapters/voice/aliases/prod", json={"version": 2}).status_code in (200, 201)
    assert served(acme.chat("voice@prod")) == second
    split = {"split": [{"version": 1, "weight": 50}, {"version": 2, "weight": 50}]}
    assert acme.call("PUT", "/v1/adapters/voice/aliases/try", json=split).status_code in (200, 201)
    seen = {
        user: {served(acme.chat("voice@try", user=user, max_tokens=1))[1] for _ in range(2)} for user in "abcdefghij"
    }
    assert all(len(versions) == 1 for versions in seen.values()), "a conversation stays on its version"
    assert set.union(*seen.values()) == {"voice@v1", "voice@v2"}


def test_shared_adapters_are_called_by_their_owner_s_name_until_they_are_taken_back(
    acme: Tenant, rival: Tenant
) -> None:
    assert acme.call("PUT", "/v1/adapters/support/shares/rival").status_code in (200, 201)
    assert "acme/support" in rival.models()
    assert served(rival.chat("acme/support"))[0] == served(acme.chat("support"))[0]
    assert rival.call("DELETE", "/v1/adapters/acme%2Fsupport").status_code == 404
    assert acme.call("DELETE", "/v1/adapters/support/shares/rival").status_code == 200
    assert rival.chat("acme/support").status_code == 404


def test_deleted_adapters_come_back_when_they_are_restored(acme: Tenant, demo_adapters: dict[str, Path]) -> None:
    acme.pushed("gone", demo_adapters["pirate"])
    before = served(acme.chat("gone"))
    assert acme.call("DELETE", "/v1/adapters/gone").status_code == 200
    assert acme.call("DELETE", "/v1/adapters/gone").status_code == 404
    assert acme.chat("gone").status_code == 404
    assert acme.call("POST", "/v1/adapters/gone/restore").status_code == 200
    assert served(acme.chat("gone")) == before


def test_scopes_and_model_lists_of_keys_hold(operator: Operator, acme: Tenant) -> None:
    reader = Tenant(acme.server, acme.id, acme.name, operator.key("acme", scopes=["adapters:read"])["key"])
    assert reader.call("GET", "/v1/adapters").status_code == 200
    refused = reader.chat("support")
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "insufficient_scope")
    assert reader.call("DELETE", "/v1/adapters/support").status_code == 403
    narrow = Tenant(acme.server, acme.id, acme.name, operator.key("acme", models=["support"])["key"])
    assert narrow.chat("support").status_code == 200
    refused = narrow.chat("SmolLM2-135M-Instruct")
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "model_not_allowed")


def test_a_revoked_key_stops_within_two_seconds_and_a_rotated_one_after_its_grace(
    operator: Operator, acme: Tenant
) -> None:
    made = operator.key("acme")
    tenant = Tenant(acme.server, acme.id, acme.name, made["key"])
    assert tenant.call("GET", "/v1/models").status_code == 200
    rotated = operator.call("POST", f"/admin/v1/tenants/acme/keys/{made['id']}/rotate", json={"grace_seconds": 2})
    assert rotated.status_code in (200, 201), rotated.text
    fresh = Tenant(acme.server, acme.id, acme.name, rotated.json()["key"])
    assert tenant.call("GET", "/v1/models").status_code == 200
    assert fresh.call("GET", "/v1/models").status_code == 200
    time.sleep(4.5)
    assert tenant.call("GET", "/v1/models").status_code == 401
    gone = operator.call("DELETE", f"/admin/v1/tenants/acme/keys/{rotated.json()['id']}")
    assert gone.status_code == 200, gone.text
    time.sleep(2)
    refused = fresh.call("GET", "/v1/models")
    assert refused.status_code == 401
    assert fresh.key not in refused.text


def test_disabling_a_tenant_ends_its_streams(operator: Operator, demo_adapters: dict[str, Path]) -> None:
    tenant = operator.tenant("shortlived")
    body = {
        "model": "SmolLM2-135M-Instruct",
        "messages": [{"role": "user", "content": "Count for ever."}],
        "max_tokens": 1500,
        "ignore_eos": True,
        "stream": True,
    }
    headers = {"Authorization": f"Bearer {tenant.key}"}
    url = f"{tenant.server.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as stream:
        lines = stream.iter_lines()
        next(line for line in lines if line.startswith("data:"))
        operator.call("PATCH", "/admin/v1/tenants/shortlived", json={"status": "disabled"}).raise_for_status()
        disabled = time.monotonic()
        events = [line for line in lines if line.startswith("data:")]
    assert time.monotonic() - disabled < 5
    assert "tenant_disabled" in events[-1]
    assert tenant.chat("SmolLM2-135M-Instruct").json()["error"]["code"] == "tenant_disabled"


def test_the_audit_log_tells_who_did_what(operator: Operator, acme: Tenant) -> None:
    entries = operator.call("GET", "/admin/v1/audit?tenant=acme&limit=100").json()["data"]
    actions = {entry["action"] for entry in entries}
    assert {"tenant.create", "key.create", "adapter.rollback", "adapter.delete"} <= actions
    assert acme.key not in json.dumps(entries)


def test_an_upload_without_a_valid_key_is_refused_before_its_body(server: Server) -> None:
    """The body never comes: whoever waits for it gets no answer."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(
            b"POST /v1/adapters HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer pg-wrong\r\n"
            b"Content-Type: multipart/form-data; boundary=x\r\nContent-Length: 2000000000\r\n\r\n"
        )
        assert connection.recv(4096).startswith(b"HTTP/1.1 401 ")
