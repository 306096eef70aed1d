"""What the end-to-end tests of tenants do over and over: make tenants and keys, pack and upload adapters, ask."""

from __future__ import annotations

import io
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI
from tests.e2e.server import ADMIN_KEY, Server


def zipped(folder: Path) -> bytes:
    """A PEFT folder's two files as a .zip."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            archive.write(folder / name, name)
    return buffer.getvalue()


@dataclass
class Operator:
    """Calls the operator's routes."""

    server: Server

    def call(self, method: str, path: str, **options: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        return httpx.request(method, f"{self.server.url}{path}", headers=headers, timeout=60, **options)

    def tenant(self, name: str) -> Tenant:
        """A new tenant with a key of all scopes."""
        made = self.call("POST", "/admin/v1/tenants", json={"name": name})
        assert made.status_code == 201, made.text
        return Tenant(self.server, made.json()["id"], name, self.key(name)["key"])

    def key(self, tenant: str, **fields: Any) -> dict[str, Any]:
        made = self.call("POST", f"/admin/v1/tenants/{tenant}/keys", json={"name": "test", **fields})
        assert made.status_code == 201, made.text
        body: dict[str, Any] = made.json()
        return body


@dataclass
class Tenant:
    """Calls the tenant's routes with its key."""

    server: Server
    id: str
    name: str
    key: str

    def call(self, method: str, path: str, **options: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.key}"} | options.pop("headers", {})
        return httpx.request(method, f"{self.server.url}{path}", headers=headers, timeout=60, **options)

    def push(self, name: str, content: bytes, filename: str = "adapter.zip") -> httpx.Response:
        return self.call("POST", "/v1/adapters", data={"name": name}, files={"file": (filename, content)})

    def pushed(self, name: str, folder: Path) -> dict[str, Any]:
        """Upload a folder that is right, and wait until it is ready."""
        answer = self.push(name, zipped(folder))
        assert answer.status_code in (200, 201), answer.text
        self.server.wait(lambda: self.shown(name)["latest"] is None, 60)
        body: dict[str, Any] = self.shown(name)
        return body

    def shown(self, name: str) -> dict[str, Any]:
        answer = self.call("GET", f"/v1/adapters/{name}")
        assert answer.status_code == 200, answer.text
        body: dict[str, Any] = answer.json()
        return body

    def openai(self) -> OpenAI:
        return self.server.openai(self.key)

    def chat(self, model: str, text: str = "What is the capital of Germany?", **options: Any) -> httpx.Response:
        """A short greedy answer."""
        body = {"model": model, "messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 16}
        return self.call("POST", "/v1/chat/completions", json=body | options)

    def models(self) -> set[str]:
        return {model["id"] for model in self.call("GET", "/v1/models").json()["data"]}


def served(answer: httpx.Response) -> tuple[str, str]:
    """What a chat answered, and which version did."""
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"], answer.headers["x-polygraft-adapter"]
