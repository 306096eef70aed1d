"""`polygraft serve`: a gateway, its workers and a private Valkey on one machine, started, watched and ended."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass

from sqlalchemy.exc import SQLAlchemyError

from polygraft.announce import Ready, reachable_url, until_ready
from polygraft.db import Database, reason
from polygraft.errors import ConfigError, OptionError, PolygraftError
from polygraft.listener import Listeners, listen, port_of
from polygraft.lock import locked
from polygraft.places import Places, places, served_name
from polygraft.process import ChildSpec
from polygraft.registry.options import parse_adapter_options
from polygraft.settings import Settings
from polygraft.supervisor import Supervisor
from polygraft.tenancy.bootstrap import Bootstrapped, bootstrap, print_keys
from polygraft.tenancy.keys import KeyHasher, load_pepper
from polygraft.valkey import PrivateValkey
from polygraft_migrations import MigrationError, check, upgrade

VALKEY = "valkey"
GATEWAY = "gateway"
WORKER_NICE = 5
"""Workers keep every core busy; what takes a step's tokens to the clients is little and must not queue behind them."""
STOP_MARGIN = 3.0
"""Seconds beyond the drain time for ending what the drain did not."""


def run(settings: Settings) -> int:
    """Serve until SIGTERM, SIGINT or SIGHUP. Returns the exit code; what went wrong is told on stderr."""
    try:
        if not settings.model:
            raise OptionError("which model? polygraft serve MODEL, a local folder or a Hub id")
        adapters = [option.name for option in parse_adapter_options(settings.adapter, served_name(settings))]
        where = places(settings)
        with ExitStack() as stack:
            stack.enter_context(locked(where.lock))
            listeners = Listeners(
                http=stack.enter_context(closing(listen(settings.host, settings.port, "--port"))),
                metrics=stack.enter_context(closing(listen(settings.host, settings.metrics_port, "--metrics-port"))),
            )
            first = _prepare_database(settings, where)
            print_keys(first)
            asyncio.run(_Deployment(settings, where, listeners, first, adapters).run())
    except PolygraftError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)  # noqa: T201
        return error.exit_code
    return 0


def _prepare_database(settings: Settings, where: Places) -> Bootstrapped:
    """Migrate, and make the first keys. Raises ConfigError, also for a schema that cannot be run on."""
    pepper = load_pepper(where.pepper) if settings.key_pepper is None else settings.key_pepper.encode()

    async def first_keys() -> Bootstrapped:
        database = Database(where.database_url)
        try:
            return await bootstrap(
                database,
                KeyHasher(pepper),
                admin_key=settings.bootstrap_admin_key,
                tenant_key=settings.bootstrap_tenant_key,
            )
        finally:
            await database.close()

    try:
        upgrade(where.database_url)
        check(where.database_url)
        return asyncio.run(first_keys())
    except (MigrationError, SQLAlchemyError, OSError) as error:
        raise ConfigError(f"the database cannot be used: {reason(error)}") from None


@dataclass(frozen=True, slots=True)
class _Deployment:
    settings: Settings
    where: Places
    listeners: Listeners
    first: Bootstrapped
    adapters: list[str]

    async def run(self) -> None:
        """Until told to stop. Raises ChildFailed or ConfigError; the children are gone in any case."""
        supervisor = Supervisor()
        stop = asyncio.Event()

        def on_signal() -> None:
            if stop.is_set():
                # Asked twice: somebody is in a hurry.
                supervisor.kill_all()
            stop.set()

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, on_signal)
        workers = [f"worker-{number}" for number in range(1, self.settings.workers + 1)]
        try:
            redis_url = await self._queue(supervisor)
            supervisor.start(self._gateway(redis_url))
            for worker in workers:
                supervisor.start(self._worker(worker, redis_url))
            await supervisor.during(self._announce_until(stop))
        finally:
            await self._end(supervisor, workers)

    async def _end(self, supervisor: Supervisor, workers: list[str]) -> None:
        """The gateway ends its streams while the workers still work; then nobody needs the workers, then the queue."""
        # The gateway shares these: as long as they are open here, connections would be accepted and never served.
        self.listeners.http.close()
        self.listeners.metrics.close()
        deadline = time.monotonic() + self.settings.drain_timeout
        await supervisor.stop([GATEWAY], self.settings.drain_timeout + STOP_MARGIN)
        await supervisor.stop(workers, max(STOP_MARGIN, deadline - time.monotonic()))
        await supervisor.stop([VALKEY], STOP_MARGIN)

    async def _queue(self, supervisor: Supervisor) -> str:
        """The queue's URL; without --redis-url, that of a private server, which answers by then."""
        if self.settings.redis_url is not None:
            return self.settings.redis_url
        valkey = PrivateValkey(self.where.valkey)
        command = valkey.command()
        supervisor.start(ChildSpec(VALKEY, tuple(command), log=self.where.valkey / "valkey.log"))
        await supervisor.during(asyncio.to_thread(valkey.wait_ready))
        return valkey.url

    def _gateway(self, redis_url: str) -> ChildSpec:
        http, metrics = self.listeners.http.fileno(), self.listeners.metrics.fileno()
        return ChildSpec(
            GATEWAY,
            (sys.executable, "-m", "polygraft", "gateway", "--listen-fd", str(http), "--metrics-fd", str(metrics)),
            env=self._environment(redis_url=redis_url),
            pass_fds=(http, metrics),
        )

    def _worker(self, name: str, redis_url: str) -> ChildSpec:
        environment = self._environment(redis_url=redis_url)
        # Keys are the gateway's business.
        for secret in ("BOOTSTRAP_ADMIN_KEY", "BOOTSTRAP_TENANT_KEY", "KEY_PEPPER"):
            environment.pop(f"POLYGRAFT_{secret}", None)
        return ChildSpec(name, (sys.executable, "-m", "polygraft", "worker"), env=environment, nice=WORKER_NICE)

    def _environment(self, **changed: object) -> dict[str, str]:
        child = self.settings.model_copy(update={"served_model_name": served_name(self.settings), **changed})
        return {**os.environ, **child.environment()}

    async def _announce_until(self, stop: asyncio.Event) -> None:
        """Say once that everything is ready; return when told to stop."""
        announcing = asyncio.create_task(self._announce())
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait([announcing, stopping], return_when=asyncio.FIRST_COMPLETED)
            if announcing.done():
                announcing.result()
            await stopping
        finally:
            announcing.cancel()
            stopping.cancel()
            await asyncio.gather(announcing, stopping, return_exceptions=True)

    async def _announce(self) -> None:
        host = self.settings.host
        url = reachable_url(host, port_of(self.listeners.http))
        await until_ready(url)
        ready = Ready(
            url=url,
            metrics_url=reachable_url(host, port_of(self.listeners.metrics)) + "/metrics",
            model=served_name(self.settings),
            adapters=self.adapters,
            key=self._example_key(),
        )
        print(ready, flush=True)  # noqa: T201

    def _example_key(self) -> str | None:
        if self.settings.auth == "none":
            return None
        return self.first.tenant_key if self.first.tenant_key is not None else "$POLYGRAFT_API_KEY"
