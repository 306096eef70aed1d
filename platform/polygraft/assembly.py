"""A gateway's parts, opened in order and put together; torch-free. `gateway` runs what comes out."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

import structlog
from fastapi import APIRouter, FastAPI
from sqlalchemy.exc import SQLAlchemyError

from polygraft.admin import audit as admin_audit
from polygraft.admin import keys as admin_keys
from polygraft.admin import tenants as admin_tenants
from polygraft.admin import workers as admin_workers
from polygraft.app import create_app
from polygraft.audit import AuditLog
from polygraft.blobs import BlobStore, BlobUnavailable
from polygraft.db import Database, reason
from polygraft.errors import ApiError, ConfigError
from polygraft.health import Health
from polygraft.metrics import Metrics
from polygraft.openai import routes as openai
from polygraft.openai.catalog import ModelCatalog
from polygraft.openai.inference import Inference, seed_source
from polygraft.places import places, served_name
from polygraft.queue.gateway import GatewayQueue
from polygraft.queue.messages import AccessChange
from polygraft.registry import routes as registry_routes
from polygraft.registry import vllm
from polygraft.registry.adapters import Adapters
from polygraft.registry.collect import Collector
from polygraft.registry.intake import Intake
from polygraft.registry.lending import Aliases, Shares
from polygraft.registry.live import LiveModels
from polygraft.registry.options import AdapterOption, clash, parse_adapter_options
from polygraft.registry.registration import register_options, retire_options
from polygraft.registry.roots import adapter_roots
from polygraft.registry.routes import AdapterServices
from polygraft.registry.service import Registry
from polygraft.registry.uploads import routes as uploads
from polygraft.registry.uploads.assembly import assemble
from polygraft.registry.uploads.service import Uploads
from polygraft.registry.uploads.validator import Validator
from polygraft.registry.validation import Check, Checkers, CheckLimits
from polygraft.registry.vllm import RuntimeLoading
from polygraft.settings import Settings
from polygraft.tenancy.access import AccessPolicy, KeyPolicy, OpenPolicy
from polygraft.tenancy.admissions import Admissions
from polygraft.tenancy.bootstrap import DEFAULT_TENANT, Bootstrapped, bootstrap, print_keys
from polygraft.tenancy.enforcement import Enforcement
from polygraft.tenancy.issued import IssuedKeys
from polygraft.tenancy.keys import KeyHasher, load_pepper
from polygraft.tenancy.principal import TENANT_SCOPES, Principal
from polygraft.tenancy.request import Owner, calling_tenant
from polygraft.tenancy.service import Authenticator
from polygraft.tenancy.tenants import Tenants
from polygraft_adapters.inspection import inspect_adapter

log = structlog.get_logger(__name__)

REGISTER_SECONDS = 60.0
"""How long the database or the blob store may be away while the options' adapters are registered."""
REGISTER_PAUSE = 2.0
"""Seconds between two tries."""


@dataclass(frozen=True, slots=True)
class Gateway:
    """What the process serves and keeps going."""

    inference: Inference
    health: Health
    metrics: Metrics
    app: FastAPI
    live: LiveModels
    enforcement: Enforcement
    options: Options
    validator: Validator
    collector: Collector

    async def background(self) -> None:
        """Know the workers and the keys, register the options' adapters once their model is known, see to uploads and
        collect what nobody needs. Ends only by an error, the queue's included.
        """
        await asyncio.gather(
            self.live.keep_fresh(),
            self.enforcement.keep_checking(),
            self.options.register(),
            self.validator.keep_going(),
            self.collector.keep_collecting(),
            self.inference.queue.broken(),
        )


@dataclass(frozen=True, slots=True)
class Options:
    """The `--adapter` options of this start, for the tenant `default`."""

    adapters: tuple[AdapterOption, ...]
    base_model: str
    tenant_id: str
    database: Database
    blobs: BlobStore
    live: LiveModels
    registry: Registry

    async def register(self) -> None:
        """Take them in once the model's card is known, and retire those of earlier starts. Raises ConfigError, and
        SQLAlchemyError or BlobUnavailable for a database or a blob store that stays away.
        """
        given_up = time.monotonic() + REGISTER_SECONDS
        while True:
            try:
                await self._register()
                break
            except (SQLAlchemyError, BlobUnavailable) as error:
                if time.monotonic() > given_up:
                    raise
                log.warning("adapters_not_registered", error=reason(error))
            await asyncio.sleep(REGISTER_PAUSE)
        self.registry.complete = True
        log.info("adapters_registered", adapters=[option.name for option in self.adapters])

    async def _register(self) -> None:
        if self.adapters:
            card = await self.live.card(self.base_model)
            self._refuse_clashes()
            await register_options(self.database, self.blobs, self.tenant_id, card, self.adapters, inspect_adapter)
        else:
            await retire_options(self.database, self.tenant_id)

    def _refuse_clashes(self) -> None:
        """The options' own base was looked at when they were read; other workers may serve other models."""
        for option in self.adapters:
            for base in self.live.now.cards:
                if clash(option.name, base):
                    raise ConfigError(f"--adapter {option.name!r} clashes with the base model {base!r}")


@asynccontextmanager
async def open_gateway(settings: Settings) -> AsyncIterator[Gateway]:
    """Connect to everything. Raises ConfigError, and for what cannot be reached ApiError 503 (the queue),
    SQLAlchemyError, BlobUnavailable or OSError.
    """
    where = places(settings)
    base_model = served_name(settings)
    adapters = parse_adapter_options(settings.adapter, base_model)
    if adapters and not base_model:
        raise ConfigError("--adapter needs --served-model-name, to know which model the adapters belong to")
    if settings.redis_url is None:
        raise ConfigError("a gateway needs --redis-url, where its workers take their jobs from")
    gateway_id = f"gw_{uuid.uuid4().hex}"
    async with AsyncExitStack() as stack:
        database = Database(where.database_url)
        stack.push_async_callback(database.close)
        pepper = load_pepper(where.pepper) if settings.key_pepper is None else settings.key_pepper.encode()
        hasher = KeyHasher(pepper)
        first = await bootstrap(
            database, hasher, admin_key=settings.bootstrap_admin_key, tenant_key=settings.bootstrap_tenant_key
        )
        print_keys(first)
        authenticator, admissions = Authenticator(database, hasher), Admissions()
        enforcement = Enforcement(database, authenticator, admissions)
        queue = await GatewayQueue.connect(settings.redis_url, gateway_id, heard=enforcement.apply)
        stack.push_async_callback(queue.close)
        live = LiveModels(queue)
        await live.refresh()
        registry = Registry(database, live)
        metrics = Metrics(live)
        blobs = where.blobs.open()
        inference = Inference(
            queue=queue,
            resolver=registry,
            catalog=ModelCatalog(lambda: live.now.cards, blobs.path),
            gateway_id=gateway_id,
            seeds=seed_source(settings.seed),
            observer=metrics,
        )
        stack.callback(inference.close)

        async def announce(change: AccessChange) -> None:
            enforcement.apply(change)
            try:
                await queue.announce(change)
            except ApiError as error:
                # The other gateways look for themselves every few seconds.
                log.warning("change_not_announced", id=change.id, error=error.message)

        tenants = Tenants(database, announce, default_needed_by=_needs_default(settings))
        health = Health(live, registry, database.ping)
        checkers = Checkers()
        stack.push_async_callback(checkers.close)
        receiving = assemble(
            database,
            Intake(database, live),
            live,
            blobs,
            checkers.validate,
            max_bytes=settings.max_adapter_size,
            adapter_roots=settings.adapter_root,
            import_sources=settings.import_source,
        )
        stack.push_async_callback(receiving.validator.close)
        routers = (
            openai.build_router(inference),
            *_adapter_routers(
                AdapterParts(database, live, blobs, receiving.uploads, checkers.validate, tenants),
                settings,
                first.tenant_id,
            ),
            admin_tenants.build_router(tenants),
            admin_keys.build_router(IssuedKeys(database, hasher, announce)),
            admin_audit.build_router(AuditLog(database), tenants),
            admin_workers.build_router(live),
        )
        yield Gateway(
            inference=inference,
            health=health,
            metrics=metrics,
            app=create_app(routers, health, _policy(settings, authenticator, first), admissions, metrics),
            live=live,
            enforcement=enforcement,
            options=Options(adapters, base_model, first.tenant_id, database, blobs, live, registry),
            validator=receiving.validator,
            collector=Collector(database, blobs, queue),
        )


@dataclass(frozen=True, slots=True)
class AdapterParts:
    """What the routes of adapters work with."""

    database: Database
    live: LiveModels
    blobs: BlobStore
    uploads: Uploads
    check: Check
    tenants: Tenants


def _adapter_routers(parts: AdapterParts, settings: Settings, default_tenant: str) -> Iterator[APIRouter]:
    """The tenants' routes, the same for operators below a tenant's name, and vLLM's."""
    adapters = Adapters(parts.database)
    services = AdapterServices(adapters, Aliases(adapters), Shares(adapters), parts.blobs)
    for prefix, owner in (
        ("/v1/adapters", calling_tenant),
        ("/admin/v1/tenants/{tenant}/adapters", admin_tenants.named_tenant(parts.tenants)),
    ):
        # Before the others, where `import` and `uploads` would be an adapter's name.
        yield uploads.build_router(parts.uploads, prefix=prefix, owner=owner)
        yield registry_routes.build_router(services, prefix=prefix, owner=owner)
    yield vllm.build_router(
        RuntimeLoading(
            Owner(default_tenant, DEFAULT_TENANT),
            adapter_roots(settings.adapter_root),
            adapters,
            Intake(parts.database, parts.live),
            parts.live,
            parts.blobs,
            partial(parts.check, limits=CheckLimits(settings.max_adapter_size)),
        )
    )


def _needs_default(settings: Settings) -> str | None:
    """Which option would leave somebody unserved if the tenant `default` were disabled."""
    if settings.auth == "none":
        return "--auth none"
    return "--adapter" if settings.adapter else None


def _policy(settings: Settings, authenticator: Authenticator, first: Bootstrapped) -> AccessPolicy:
    """Raises ConfigError where everybody would be a tenant that is disabled."""
    by_key = KeyPolicy(authenticator)
    if settings.auth == "keys":
        return by_key
    if not first.tenant_active:
        raise ConfigError(
            f"--auth none serves everybody as the tenant `{DEFAULT_TENANT}`, which is disabled: enable it under "
            "--auth keys first"
        )
    anybody = Principal(key_id="none", tenant_id=first.tenant_id, tenant_name=DEFAULT_TENANT, scopes=TENANT_SCOPES)
    return OpenPolicy(anybody, by_key)
