"""Keeps children running: restarts with back-off, and gives up when that does not help."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Collection, Coroutine
from dataclasses import dataclass
from typing import Any

import structlog

from polygraft.errors import PolygraftError
from polygraft.process import ChildSpec, describe_exit, end, spawn

log = structlog.get_logger(__name__)

CONFIG_EXIT_CODE = 78
"""What a child exits with when no restart can help (sysexits.h: EX_CONFIG); it has said why on stderr."""


class ChildFailed(PolygraftError):
    """A child that cannot be kept running; everything ends with it."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """`limit` deaths within `window` seconds end everything; delays double from `first_delay` to `longest_delay`."""

    limit: int = 5
    window: float = 60.0
    first_delay: float = 0.25
    longest_delay: float = 5.0

    def delay(self, deaths: int) -> float:
        """Seconds to wait after the `deaths`-th death within the window."""
        return min(self.longest_delay, self.first_delay * 2.0 ** (deaths - 1))


class _KeptAlive:
    """One child and its successors."""

    def __init__(self, spec: ChildSpec, policy: RestartPolicy) -> None:
        self._spec = spec
        self._policy = policy
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        self.task = asyncio.create_task(self._run())

    async def stop(self, grace: float) -> None:
        """End the child and start no other."""
        self._stopping.set()
        if self._process is not None:
            await end(self._process, grace)
        # Whatever it failed with has been superseded by the wish to stop.
        await asyncio.gather(self.task, return_exceptions=True)

    def kill(self) -> None:
        """SIGKILL to the child that runs now, if any."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def _run(self) -> None:
        """Returns once stopped. Raises ChildFailed."""
        deaths: deque[float] = deque()
        while not self._stopping.is_set():
            self._process = await spawn(self._spec)
            if self._stopping.is_set():
                await end(self._process, 0.0)
                return
            code = await self._process.wait()
            if self._stopping.is_set():
                return
            if code == CONFIG_EXIT_CODE:
                raise ChildFailed(f"{self._spec.name} cannot run as configured")
            now = time.monotonic()
            deaths.append(now)
            while deaths[0] < now - self._policy.window:
                deaths.popleft()
            if len(deaths) >= self._policy.limit:
                told = "" if self._spec.log is None else f"; see {self._spec.log}"
                raise ChildFailed(
                    f"{self._spec.name} died {len(deaths)} times within {self._policy.window:g} seconds "
                    f"(the last time with {describe_exit(code)}{told})"
                )
            delay = self._policy.delay(len(deaths))
            log.error("child_died", child=self._spec.name, exit=describe_exit(code), restart_in=delay)
            await self._pause(delay)

    async def _pause(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._stopping.wait(), seconds)
        except TimeoutError:
            return


class Supervisor:
    """All children of `serve`, by name."""

    def __init__(self, policy: RestartPolicy | None = None) -> None:
        self._policy = policy if policy is not None else RestartPolicy()
        self._children: dict[str, _KeptAlive] = {}

    def start(self, spec: ChildSpec) -> None:
        """Run the child from now on."""
        self._children[spec.name] = _KeptAlive(spec, self._policy)

    async def during(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` to its end while the children started so far keep running. Raises ChildFailed, and cancels the
        work, as soon as one cannot.
        """
        working = asyncio.create_task(work)
        children = [child.task for child in self._children.values()]
        try:
            await asyncio.wait([working, *children], return_when=asyncio.FIRST_COMPLETED)
            for task in children:
                if task.done():
                    task.result()
            await working
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    async def stop(self, names: Collection[str], grace: float) -> None:
        """End these children, side by side, each within `grace` seconds or by SIGKILL."""
        await asyncio.gather(*(self._children[name].stop(grace) for name in names if name in self._children))

    def kill_all(self) -> None:
        """SIGKILL to every child, for those who will not wait for `stop`."""
        for child in self._children.values():
            child.kill()
