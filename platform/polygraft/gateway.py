"""The gateway process: HTTP in front, the queue behind; torch-free. `assembly` puts the parts together."""

from __future__ import annotations

import asyncio
import signal
import sys

import structlog
import uvloop
from sqlalchemy.exc import SQLAlchemyError

from polygraft.assembly import open_gateway
from polygraft.blobs import BlobError
from polygraft.db import reason
from polygraft.errors import ApiError, ConfigError
from polygraft.listener import HttpServer, Listeners, port_of
from polygraft.settings import Settings
from polygraft.supervisor import CONFIG_EXIT_CODE

log = structlog.get_logger(__name__)

END_SECONDS = 2.0
"""What answers get to say that they were ended, after the drain time."""


def run(settings: Settings, listeners: Listeners) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit code: 78 for what no restart can help, told on stderr; 1 when the
    database, the queue or the blob store stayed away.
    """
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(settings, listeners))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)  # noqa: T201
        return CONFIG_EXIT_CODE
    except SQLAlchemyError as error:
        log.error("gateway_failed", dependency="database", error=reason(error))
        return 1
    except (ApiError, BlobError, OSError) as error:
        log.error("gateway_failed", error=str(error))
        return 1
    return 0


async def _serve(settings: Settings, listeners: Listeners) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with open_gateway(settings) as gateway:
        http = HttpServer(gateway.app, drain_seconds=settings.drain_timeout + END_SECONDS)
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
