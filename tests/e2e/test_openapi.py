"""The OpenAPI document is true: requests made from it by the thousand are answered as it says, and never with a 5xx."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from tests.e2e.conftest import StartServer
from tests.e2e.server import ADMIN_KEY, TENANT_KEY, Server

pytestmark = pytest.mark.slow

SECONDS = 60
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,ignored_auth"


@pytest.fixture(scope="module")
def described(start_server: StartServer, demo_model: Path) -> Server:
    """A server of its own: what is made from the document deletes and disables as it likes."""
    return start_server(str(demo_model), "--max-model-len", "256")


def test_every_route_but_the_probes_is_described(described: Server) -> None:
    document = httpx.get(f"{described.url}/openapi.json").json()
    routes = {(method, path) for path, methods in document["paths"].items() for method in methods}
    for expected in (
        ("post", "/v1/chat/completions"),
        ("post", "/v1/adapters"),
        ("post", "/v1/adapters/{name}/rollback"),
        ("put", "/v1/adapters/{name}/aliases/{alias}"),
        ("patch", "/v1/adapters/uploads/{upload}"),
        ("post", "/admin/v1/tenants"),
        ("get", "/admin/v1/tenants/{tenant}/adapters"),
        ("get", "/admin/v1/audit"),
    ):
        assert expected in routes
    assert "bearerFormat" in str(document["components"]["securitySchemes"]) or document["components"]["securitySchemes"]


@pytest.mark.parametrize(
    ("key", "routes"), [(TENANT_KEY, "^/v1/"), (ADMIN_KEY, "^/admin/")], ids=["tenant", "operator"]
)
def test_requests_made_from_the_document_never_fail(described: Server, key: str, routes: str, tmp_path: Path) -> None:
    command = [str(Path(sys.executable).parent / "schemathesis"), "run", f"{described.url}/openapi.json"]
    command += ["--header", f"Authorization: Bearer {key}", "--include-path-regex", routes]
    command += ["--checks", CHECKS, "--phases", "examples,coverage,fuzzing", "--max-examples", "20"]
    command += ["--max-time", str(SECONDS), "--seed", "1", "--request-timeout", "30", "--continue-on-failure"]
    command += ["--suppress-health-check", "all", "--warnings", "off"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS * 5, check=False)
    assert run.returncode == 0, run.stdout[-6000:]
    assert httpx.get(f"{described.url}/health/ready").status_code == 200
