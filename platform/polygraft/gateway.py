"""The gateway process: HTTP in front, the queue behind. Puts the parts together and owns their life; torch-free."""

from __future__ import annotations

import asyncio
import signal
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import structlog
import uvloop

from polygraft.app import create_app
from polygraft.blobs import BlobStore
from polygraft.db import Database
from polygraft.errors import ApiError, ConfigError
from polygraft.health import Health
from polygraft.listener import HttpServer, Listeners, port_of
from polygraft.metrics import Metrics
from polygraft.openai.catalog import ModelCatalog
from polygraft.openai.inference import Inference, seed_source
from polygraft.places import places, served_name
from polygraft.queue.gateway import GatewayQueue
from polygraft.registry.live import LiveModels
from polygraft.registry.options import AdapterOption, clash, parse_adapter_options
from polygraft.registry.registration import register_options, retire_options
from polygraft.registry.service import Registry
from polygraft.settings import Settings
from polygraft.supervisor import CONFIG_EXIT_CODE
from polygraft.tenancy.access import AccessPolicy, KeyPolicy, OpenPolicy
from polygraft.tenancy.bootstrap import DEFAULT_TENANT, Bootstrapped, bootstrap, print_keys
from polygraft.tenancy.keys import KeyHasher, load_pepper
from polygraft.tenancy.principal import TENANT_SCOPES, Principal
from polygraft.tenancy.service import Authenticator
from polygraft_adapters.inspection import inspect_adapter

log = structlog.get_logger(__name__)

END_SECONDS = 2.0
"""What answers get to say that they were ended, after the drain time."""


def run(settings: Settings, listeners: Listeners) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit code: 78 for what no restart can help, told on stderr."""
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(settings, listeners))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)  # noqa: T201
        return CONFIG_EXIT_CODE
    except ApiError as error:
        log.error("gateway_failed", error=error.message)
        return 1
    return 0


async def _serve(settings: Settings, listeners: Listeners) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with _open(settings) as gateway:
        http = HttpServer(
            create_app(gateway.inference, gateway.policy, gateway.health, gateway.metrics),
            drain_seconds=settings.drain_timeout + END_SECONDS,
        )
        scraped = HttpServer(gateway.metrics.app(), drain_seconds=END_SECONDS)
        serving = [
            asyncio.create_task(http.serve([listeners.http])),
            asyncio.create_task(scraped.serve([listeners.metrics])),
        ]
        background = asyncio.create_task(gateway.background())
        stopping = asyncio.create_task(stop.wait())
        log.info("gateway_listening", port=port_of(listeners.http), metrics_port=port_of(listeners.metrics))
        try:
            await asyncio.wait([*serving, background, stopping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            gateway.health.draining = True
            http.stop()
            await asyncio.wait([serving[0]], timeout=settings.drain_timeout)
            if not serving[0].done():
                # What still runs gets an error as its last event rather than a torn connection.
                await gateway.inference.queue.close()
            await asyncio.gather(serving[0], return_exceptions=True)
            scraped.stop()
            stopping.cancel()
            background.cancel()
            await asyncio.gather(serving[1], stopping, background, return_exceptions=True)
        for task in (*serving, background):
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error


@dataclass(frozen=True, slots=True)
class _Gateway:
    inference: Inference
    policy: AccessPolicy
    health: Health
    metrics: Metrics
    live: LiveModels
    registry: Registry
    database: Database
    blobs: BlobStore
    tenant_id: str
    base_model: str
    options: tuple[AdapterOption, ...]

    async def background(self) -> None:
        """Know the workers, and register the options' adapters once their model is known. Ends only by an error, the
        queue's included.
        """
        await asyncio.gather(self.live.keep_fresh(), self._register(), self.inference.queue.broken())

    async def _register(self) -> None:
        if self.options:
            card = await self.live.card(self.base_model)
            self._refuse_clashes()
            await register_options(self.database, self.blobs, self.tenant_id, card, self.options, inspect_adapter)
        else:
            await retire_options(self.database, self.tenant_id)
        self.registry.complete = True
        log.info("adapters_registered", adapters=[option.name for option in self.options])

    def _refuse_clashes(self) -> None:
        """The options' own base was looked at when they were read; other workers may serve other models."""
        for option in self.options:
            for base in self.live.now.cards:
                if clash(option.name, base):
                    raise ConfigError(f"--adapter {option.name!r} clashes with the base model {base!r}")


@asynccontextmanager
async def _open(settings: Settings) -> AsyncIterator[_Gateway]:
    """Connect to everything. Raises ConfigError, and ApiError 503 when the queue cannot be reached."""
    where = places(settings)
    base_model = served_name(settings)
    options = parse_adapter_options(settings.adapter, base_model)
    if options and not base_model:
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
        queue = await GatewayQueue.connect(settings.redis_url, gateway_id)
        stack.push_async_callback(queue.close)
        live = LiveModels(queue)
        await live.refresh()
        registry = Registry(database, live)
        metrics = Metrics(live)
        blobs = BlobStore(where.blobs)
        inference = Inference(
            queue=queue,
            resolver=registry,
            catalog=ModelCatalog(lambda: live.now.cards, blobs.path),
            gateway_id=gateway_id,
            seeds=seed_source(settings.seed),
            observer=metrics,
        )
        stack.callback(inference.close)
        yield _Gateway(
            inference=inference,
            policy=_policy(settings, Authenticator(database, hasher), first),
            health=Health(live, registry, database.ping),
            metrics=metrics,
            live=live,
            registry=registry,
            database=database,
            blobs=blobs,
            tenant_id=first.tenant_id,
            base_model=base_model,
            options=options,
        )


def _policy(settings: Settings, authenticator: Authenticator, first: Bootstrapped) -> AccessPolicy:
    keys = KeyPolicy(authenticator)
    if settings.auth == "keys":
        return keys
    anybody = Principal(key_id="none", tenant_id=first.tenant_id, tenant_name=DEFAULT_TENANT, scopes=TENANT_SCOPES)
    return OpenPolicy(anybody, keys)
