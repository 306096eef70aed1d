"""Loading and unloading by path: what is allowed, what is told, and that it is an upload like any other."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from safetensors.numpy import save_file
from starlette.types import Receive, Scope, Send

from polygraft.blobs import BlobStore
from polygraft.card import ModelCard
from polygraft.openai.errors import install_error_handlers
from polygraft.registry.adapters import Adapters
from polygraft.registry.intake import Intake
from polygraft.registry.live import LiveModels
from polygraft.registry.roots import adapter_roots
from polygraft.registry.service import Registry
from polygraft.registry.vllm import RuntimeLoading, build_router
from polygraft.tenancy.principal import Principal
from polygraft.tenancy.request import Owner
from polygraft_adapters.inspection import inspect_adapter
from polygraft_adapters.types import AdapterInfo

OPERATOR = Principal("key_admin", None, None, frozenset({"admin"}))
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def save(folder: Path, value: float) -> Path:
    """An adapter of q_proj whose every number is `value`."""
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    tensors = {
        name.format("A"): np.full((2, 4), value, np.float32),
        name.format("B"): np.full((4, 2), value, np.float32),
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


async def validate(folder: Path, card: ModelCard) -> AdapterInfo:
    return await asyncio.to_thread(inspect_adapter, folder, card.modules, card.max_lora_rank)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with two adapters and links, beside an adapter that is none of its business."""
    root = tmp_path / "adapters"
    save(root / "one", 1.0)
    save(root / "two", 2.0)
    save(tmp_path / "secret", 3.0)
    (root / "link").symlink_to(tmp_path / "secret")
    (root / "inside").symlink_to(root / "one")
    half = root / "half"
    half.mkdir()
    (half / "adapter_config.json").write_bytes((root / "one" / "adapter_config.json").read_bytes())
    (half / "adapter_model.safetensors").symlink_to(tmp_path / "secret" / "adapter_model.safetensors")
    (root / "loop").symlink_to(root / "loop")
    return root


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


@pytest.fixture
def open_client(
    owners: dict[str, Owner], adapters: Adapters, intake: Intake, live: LiveModels, blobs: BlobStore
) -> Any:
    """A client of a server with these roots."""

    def opened(*roots: Path) -> httpx.AsyncClient:
        folders = adapter_roots([str(root) for root in roots])
        loading = RuntimeLoading(owners["acme"], folders, adapters, intake, live, blobs, validate)
        app = FastAPI()
        install_error_handlers(app)
        app.include_router(build_router(loading))

        async def as_operator(scope: Scope, receive: Receive, send: Send) -> None:
            scope.setdefault("state", {})["principal"] = OPERATOR
            await app(scope, receive, send)

        return httpx.AsyncClient(transport=httpx.ASGITransport(as_operator), base_url="http://localhost")

    return opened


@pytest.fixture
async def client(open_client: Any, root: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with open_client(root) as client:
        yield client


def refusal(answer: httpx.Response) -> tuple[int, str | None]:
    return answer.status_code, answer.json()["error"]["code"]


async def load(client: httpx.AsyncClient, name: str, path: Path | str, **fields: Any) -> httpx.Response:
    return await client.post(LOAD, json={"lora_name": name, "lora_path": str(path)} | fields)


async def test_what_was_loaded_is_told_and_served(
    client: httpx.AsyncClient, registry: Registry, principals: dict[str, Principal], root: Path, blobs: BlobStore
) -> None:
    answer = await load(client, "a", root / "one")
    assert answer.status_code == 200, answer.text
    told = answer.json()
    assert (told["version"], told["rank"], told["target_modules"], told["status"]) == (1, 2, ["q_proj"], "ready")
    assert told["digest"] == (await registry.resolve(principals["acme"], "a")).digest
    assert blobs.adapter_path(told["digest"]).is_dir()
    assert list((blobs.root / "staging").iterdir()) == []
    assert (await load(client, "b", "one")).json()["digest"] == told["digest"]
    assert (await load(client, "c", "inside")).json()["digest"] == told["digest"]


async def test_a_name_in_use_is_replaced_only_on_demand(
    client: httpx.AsyncClient, registry: Registry, principals: dict[str, Principal], root: Path
) -> None:
    assert (await load(client, "a", root / "one")).status_code == 200
    first = await registry.resolve(principals["acme"], "a")
    assert refusal(await load(client, "a", root / "two")) == (400, "name_taken")
    assert (await registry.resolve(principals["acme"], "a")) == first
    replaced = await load(client, "a", root / "two", load_inplace=True)
    assert (replaced.status_code, replaced.json()["version"]) == (200, 2)
    assert (await registry.resolve(principals["acme"], "a")).digest != first.digest
    assert (await load(client, "a", root / "two", load_inplace=True)).json()["version"] == 2
    assert (await client.post(UNLOAD, json={"lora_name": "a"})).status_code == 200
    # The same name with other files is those files.
    assert (await load(client, "a", root / "one")).json()["version"] == 4
    assert (await registry.resolve(principals["acme"], "a")).digest == first.digest


async def test_calls_at_the_same_time_leave_no_ghosts(
    client: httpx.AsyncClient, registry: Registry, principals: dict[str, Principal]
) -> None:
    loads = await asyncio.gather(*(load(client, "a", "one") for _ in range(3)))
    assert sorted(answer.status_code for answer in loads) == [200, 400, 400]
    unloads = await asyncio.gather(*(client.post(UNLOAD, json={"lora_name": "a"}) for _ in range(3)))
    assert sorted(answer.status_code for answer in unloads) == [200, 404, 404]
    assert [entry.id for entry in await registry.list_models(principals["acme"])] == ["base"]


async def test_no_path_leads_out_of_the_roots_and_all_are_refused_in_the_same_words(
    client: httpx.AsyncClient, root: Path
) -> None:
    outside = [
        "/etc", "/nowhere", root / ".." / "secret", root / "../../etc/passwd", "../secret", "link", root / "link",
        "half", "loop", root / "nothing", "file:///etc", "\\\\host\\share", "a\0b", "x" * 4000, "org/repo",
    ]  # fmt: skip
    answers = [await load(client, "a", path) for path in outside]
    assert {refusal(answer) for answer in answers} == {(403, "path_not_allowed")}
    assert len({answer.text for answer in answers}) == 1


async def test_without_a_root_the_routes_say_how_to_get_one(open_client: Any) -> None:
    async with open_client() as client:
        answer = await load(client, "a", "/anywhere")
        assert refusal(answer) == (403, "runtime_loading_off")
        assert "--adapter-root" in answer.text
        for path in (LOAD, UNLOAD):
            assert (await client.get(path)).status_code == 405


async def test_bad_adapters_leave_nothing_behind(
    client: httpx.AsyncClient, root: Path, blobs: BlobStore, adapters: Adapters, owners: dict[str, Owner]
) -> None:
    assert (await load(client, "good", "one")).status_code == 200
    whole = (root / "two" / "adapter_model.safetensors").read_bytes()
    (root / "two" / "adapter_model.safetensors").write_bytes(whole[:-1])
    for name in ("bad", "good"):
        answer = await load(client, name, "two", load_inplace=True)
        assert refusal(answer) == (422, "invalid_adapter")
        assert answer.json()["error"]["errors"]
    assert refusal(await load(client, "bad", ".")) == (422, "invalid_adapter")
    assert [adapter.name for adapter in await adapters.page(owners["acme"], 10, None)] == ["good"]
    assert len(blobs.adapters()) == 1
    assert list((blobs.root / "staging").iterdir()) == []


async def test_names_and_models_that_cannot_be(client: httpx.AsyncClient) -> None:
    assert refusal(await load(client, "base", "one")) == (409, "name_taken")
    for name in ("", "A", "a/b", "a\0", "x" * 65):
        assert refusal(await load(client, name, "one"))[0] == 400
    assert refusal(await load(client, "a", "one", base_model="none"))[0] == 400
    assert refusal(await load(client, "a", "one", more=1))[0] == 400
    for name in ("nothing", "", "a\0", "模型"):
        assert refusal(await client.post(UNLOAD, json={"lora_name": name})) == (404, "not_found")


async def test_of_several_models_one_must_be_named(client: httpx.AsyncClient, directory: Any, live: LiveModels) -> None:
    directory.known = {**directory.known, "second": directory.known["base"]}
    await live.refresh()
    assert refusal(await load(client, "a", "one"))[0] == 400
    assert (await load(client, "a", "one", base_model="base")).status_code == 200
    directory.known = {}
    await live.refresh()
    assert refusal(await load(client, "b", "one"))[0] == 503
