"""Children are kept running, up to a point, and never outlive their parent."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from polygraft.process import ChildSpec, end, spawn
from polygraft.supervisor import CONFIG_EXIT_CODE, ChildFailed, RestartPolicy, Supervisor

SLEEPER = "import time; time.sleep(60)"


def child(code: str, name: str = "dummy") -> ChildSpec:
    return ChildSpec(name, (sys.executable, "-c", code))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  # the condition is another process's
            await asyncio.sleep(0.01)


@pytest.fixture
async def supervisor() -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(RestartPolicy(limit=3, window=60.0, first_delay=0.01, longest_delay=0.02))
    yield supervisor
    await supervisor.stop(["dummy", "other"], 0.0)


def appends_its_pid(path: Path, then: str) -> str:
    return f"import os, time\nwith open({str(path)!r}, 'a') as f: f.write(f'{{os.getpid()}}\\n')\n{then}"


def pids(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().splitlines()] if path.exists() else []


async def test_a_dead_child_is_restarted(supervisor: Supervisor, tmp_path: Path) -> None:
    started = tmp_path / "started"
    supervisor.start(child(appends_its_pid(started, "time.sleep(60)")))
    await until(lambda: len(pids(started)) == 1)
    os.kill(pids(started)[0], signal.SIGKILL)
    await until(lambda: len(pids(started)) == 2)
    assert psutil.pid_exists(pids(started)[1])
    await supervisor.stop(["dummy"], 5.0)
    assert not psutil.pid_exists(pids(started)[1])
    assert len(pids(started)) == 2


async def test_repeated_death_ends_everything(supervisor: Supervisor, tmp_path: Path) -> None:
    started = tmp_path / "started"
    supervisor.start(child(appends_its_pid(started, "raise SystemExit(7)")))
    with pytest.raises(ChildFailed, match=r"dummy died 3 times within 60 seconds .* exit code 7"):
        await supervisor.during(asyncio.sleep(60))
    assert len(pids(started)) == 3


async def test_a_configuration_error_ends_everything_at_once(supervisor: Supervisor, tmp_path: Path) -> None:
    started = tmp_path / "started"
    supervisor.start(child(SLEEPER, "other"))
    supervisor.start(child(appends_its_pid(started, f"raise SystemExit({CONFIG_EXIT_CODE})")))
    with pytest.raises(ChildFailed, match="dummy cannot run as configured"):
        await supervisor.during(asyncio.sleep(60))
    assert len(pids(started)) == 1


async def test_work_that_ends_first_leaves_the_children_running(supervisor: Supervisor, tmp_path: Path) -> None:
    started = tmp_path / "started"
    supervisor.start(child(appends_its_pid(started, "time.sleep(60)")))
    await supervisor.during(until(lambda: len(pids(started)) == 1))
    assert psutil.pid_exists(pids(started)[0])


async def test_a_child_that_ignores_sigterm_is_killed() -> None:
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", deaf, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    assert await process.stdout.readline() == b"deaf\n"
    began = time.monotonic()
    await end(process, 0.2)
    assert process.returncode == -signal.SIGKILL
    assert time.monotonic() - began < 3


async def test_delays_double_up_to_the_longest() -> None:
    policy = RestartPolicy(first_delay=0.5, longest_delay=3.0)
    assert [policy.delay(deaths) for deaths in (1, 2, 3, 4, 100)] == [0.5, 1.0, 2.0, 3.0, 3.0]


async def test_output_goes_to_the_log_when_there_is_one(tmp_path: Path) -> None:
    spec = ChildSpec("talker", (sys.executable, "-c", "print('hello')"), log=tmp_path / "log")
    assert await (await spawn(spec)).wait() == 0
    assert (tmp_path / "log").read_text() == "hello\n"


@pytest.mark.skipif(sys.platform != "linux", reason="the parent's death signal is Linux's")
def test_children_die_with_a_killed_parent() -> None:
    parent = textwrap.dedent(
        f"""
        import asyncio, sys
        from polygraft.process import ChildSpec, spawn

        async def main():
            process = await spawn(ChildSpec("child", (sys.executable, "-c", {SLEEPER!r})))
            print(process.pid, flush=True)
            await asyncio.sleep(60)

        asyncio.run(main())
        """
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert psutil.Process(pid).is_running()
        process.kill()
        process.wait()
    deadline = time.monotonic() + 5
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the child outlived its parent"
        time.sleep(0.02)


async def test_a_child_can_step_back_for_others() -> None:
    process = await spawn(replace(child(SLEEPER), nice=3))
    try:
        assert psutil.Process(process.pid).nice() == min(os.getpriority(os.PRIO_PROCESS, 0) + 3, 19)
        assert autogroup(process.pid) in (None, 3)
    finally:
        await end(process, 0.0)


def autogroup(pid: int) -> int | None:
    """The nice value of the process's session, where sessions have one."""
    told = Path(f"/proc/{pid}/autogroup")
    return int(told.read_text().rpartition(" ")[2]) if told.exists() else None
