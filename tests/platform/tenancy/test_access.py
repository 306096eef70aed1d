"""Which scope opens what."""

import pytest

from polygraft.tenancy.access import scopes_for

EVERYBODY = {"inference", "adapters:read", "adapters:write", "usage:read", "admin"}


@pytest.mark.parametrize(
    ("method", "path", "scopes"),
    [
        ("POST", "/v1/chat/completions", {"inference"}),
        ("POST", "/v1/completions", {"inference"}),
        ("POST", "/tokenize", {"inference"}),
        ("POST", "/detokenize", {"inference"}),
        ("GET", "/v1/models", {"inference", "adapters:read"}),
        ("GET", "/v1/models/acme/voice@v3", {"inference", "adapters:read"}),
        ("GET", "/v1/adapters", {"adapters:read"}),
        ("HEAD", "/v1/adapters/voice", {"adapters:read"}),
        ("GET", "/v1/adapters/voice/versions/1/content", {"adapters:read"}),
        ("GET", "/v1/adapters/uploads/upl_1", {"adapters:read", "adapters:write"}),
        ("POST", "/v1/adapters", {"adapters:write"}),
        ("POST", "/v1/adapters/import", {"adapters:write"}),
        ("PATCH", "/v1/adapters/uploads/upl_1", {"adapters:write"}),
        ("PUT", "/v1/adapters/voice/aliases/prod", {"adapters:write"}),
        ("DELETE", "/v1/adapters/voice", {"adapters:write"}),
        ("BREW", "/v1/adapters/voice", {"adapters:write"}),
        ("GET", "/v1/usage", {"usage:read"}),
        ("GET", "/v1/limits", {"usage:read"}),
        ("POST", "/v1/load_lora_adapter", {"admin"}),
        ("POST", "/v1/unload_lora_adapter", {"admin"}),
        ("GET", "/admin", {"admin"}),
        ("GET", "/admin/v1/tenants", {"admin"}),
        ("POST", "/admin/v1/tenants/acme/adapters", {"admin"}),
    ],
)  # fmt: skip
def test_routes_want_their_scopes(method: str, path: str, scopes: set[str]) -> None:
    assert scopes_for(method, path) == scopes


@pytest.mark.parametrize(
    "path",
    ["", "/", "/v1", "/v1/", "/v1/files", "/v1/chat", "/v1/chat/completions/", "/v1/chat/completions/x", "/v1/modelsx",
     "/V1/models", "//v1/models", "/v1/adaptersx", "/v1//adapters", "/v1/usage/x", "/adminx", "/Admin/v1/tenants",
     "/docs", "/metrics", "/x/admin", "/v1/load_lora_adapter/", "/v1/models\n"],
)  # fmt: skip
def test_what_is_not_listed_is_open_to_nobody(path: str) -> None:
    for method in ("GET", "POST"):
        assert scopes_for(method, path) == set()
