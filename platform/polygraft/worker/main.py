"""The worker process: one model, one engine, jobs from the queue. The only importer of the engine's loop."""

from __future__ import annotations

import signal
import sys
import time
import uuid
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from types import FrameType

import structlog
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from polygraft.blobs import BlobUnavailable
from polygraft.errors import ConfigError
from polygraft.places import places
from polygraft.queue.limits import QueueLimits
from polygraft.queue.worker import QueueUnavailable, WorkerQueue
from polygraft.settings import Settings
from polygraft.supervisor import CONFIG_EXIT_CODE
from polygraft.worker.adapters import HostAdapters
from polygraft.worker.card import Prepared, prepare
from polygraft.worker.loading import AdapterLoader, single_threaded
from polygraft.worker.loop import WorkerLoop
from polygraft.worker.vitals import Heartbeat, Vitals
from polygraft_adapters.weights import AdapterWeights
from polygraft_engine.build import build_engine
from polygraft_engine.engine import Engine
from polygraft_engine.types import EngineError
from polygraft_kernels.api import BackendUnavailable

log = structlog.get_logger(__name__)

_SWITCH_SECONDS = 0.0001
"""How long a loading thread may keep the interpreter from the step loop. A step asks for it hundreds of times; with
Python's 5 ms, steps beside a load took twice as long.
"""


def run(settings: Settings) -> None:
    """Serve jobs until SIGTERM or SIGINT, then drain. Leaves by SystemExit: 0 done; 78 for what no restart can help,
    told on stderr; 1 when Redis stayed away, or the blob store was when the worker started.
    """
    stop = _Stop()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop.on_signal)
    try:
        _serve(settings, stop)
    except (ConfigError, EngineError, BackendUnavailable) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)  # noqa: T201
        sys.exit(CONFIG_EXIT_CODE)
    except (QueueUnavailable, BlobUnavailable) as error:
        log.error("worker_failed", error=str(error))
        sys.exit(1)
    sys.exit(0)


class _Stop:
    """The wish to stop, which a signal expresses. Nothing is lost by stopping at once while the model loads."""

    def __init__(self) -> None:
        self.asked = False
        self.at_once = True

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """The signal's handler."""
        self.asked = True
        if self.at_once:
            raise SystemExit(0)


def _serve(settings: Settings, stop: _Stop) -> None:
    sys.setswitchinterval(_SWITCH_SECONDS)
    if settings.redis_url is None:
        raise ConfigError("a worker needs --redis-url, where it takes its jobs from")
    limits = QueueLimits()
    blobs = places(settings).blobs.open()
    prepared = prepare(settings, blobs)
    model = prepared.card.name
    worker_id = f"wrk_{uuid.uuid4().hex}"
    structlog.contextvars.bind_contextvars(worker=worker_id, model=model)
    vitals = Vitals(worker_id, model)
    with ExitStack() as stack:
        queue = WorkerQueue(settings.redis_url, worker_id, model, limits)
        stack.callback(queue.close)
        beating = WorkerQueue(settings.redis_url, worker_id, model, limits)
        stack.callback(beating.close)
        queue.register(prepared.card, vitals.status())
        stack.push(_Leaving(queue))
        heartbeat = Heartbeat(vitals, beating.heartbeat, limits.beat)
        heartbeat.start()
        stack.callback(heartbeat.stop)
        # The engine wants its source of adapters before it is there; what is loaded for it waits for it.
        built: Future[Engine] = Future()
        loader = AdapterLoader(
            blobs,
            prepared.card,
            getattr(torch, prepared.options.dtype),
            vitals,
            prepare=lambda weights: built.result().prepare(weights),
        )
        adapters = HostAdapters(
            loader, settings.max_cpu_loras, settings.max_cpu_lora_memory, prepare_thread=single_threaded
        )
        stack.callback(adapters.close)
        engine = _load(prepared, adapters)
        built.set_result(engine)
        loop = WorkerLoop(queue, engine, adapters, prepared.files.tokenizer(), vitals, settings.max_num_seqs)
        stop.at_once = False
        vitals.state = "ready"
        vitals.rests(engine)
        queue.heartbeat(vitals.status())
        log.info("worker_ready", backend=engine.info.backend, dtype=engine.info.dtype, blocks=engine.limits.num_blocks)
        while not stop.asked:
            loop.turn()
        log.info("worker_draining")
        vitals.state = "draining"
        queue.heartbeat(vitals.status())
        loop.drain(time.monotonic() + settings.drain_timeout)


def _load(prepared: Prepared, adapters: HostAdapters[AdapterWeights]) -> Engine:
    """The engine, as the card that has been registered promises it."""
    began = time.monotonic()
    columns = (TextColumn("loading {task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("layers"))
    # A bar where somebody watches; nothing where the log is a file.
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bars:
        bar = bars.add_task(prepared.card.name, total=None)
        engine = build_engine(
            prepared.options, adapters, lambda done, total: bars.update(bar, completed=done, total=total)
        )
    for reason in engine.info.passed_over:
        log.warning("backend_passed_over", reason=reason)
    assert engine.limits.max_context == prepared.card.max_context
    assert engine.info.numerics_id == prepared.card.numerics_id
    log.info("model_loaded", seconds=round(time.monotonic() - began, 1))
    return engine


@dataclass(frozen=True, slots=True)
class _Leaving:
    """Deregisters at the end, unless the end is that Redis cannot be reached."""

    queue: WorkerQueue

    def __call__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None or not issubclass(kind, QueueUnavailable):
            self.queue.deregister()
