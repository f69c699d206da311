from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from workers.conftest import read_note, wait_until_gone

from gymsdk import offload
from gymsdk.errors import BudgetSpent, WorkerLost
from gymsdk.workers.offload import MIN_IDLE_SECONDS, use_executor
from gymsdk.workers.processes import ProcessExecutor

MEBIBYTE = 2**20
NEVER = 999.0


@offload()
def echo(value: object, *, twice: bool = False) -> object:
    return [value, value] if twice else value


@offload()
def process_id() -> int:
    return os.getpid()


@offload(timeout=2.0, cpu=0.1)
def spin() -> None:
    while True:
        pass


@offload(timeout=2.0, cpu=0.1)
def backtrack() -> object:
    return re.match(r"(a+)+$", "a" * 60 + "b")


@offload(timeout=2.0, cpu=0.1)
def power() -> object:
    return pow(10, 10**10)


@offload(timeout=0.3)
def sleep() -> None:
    time.sleep(NEVER)


@offload(cpu=1.0)
def delegate(seconds: float) -> int:
    program = f"import time\nwhile time.process_time() < {seconds}: pass"
    return subprocess.run([sys.executable, "-c", program], check=False).returncode


@offload(timeout=1.0, cpu=10.0)
def work_on_one_core(seconds: float) -> bool:
    os.sched_setaffinity(0, {0})
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass
    return True


@offload(timeout=30.0)
def pause(seconds: float, note: str = "") -> int:
    if note:
        Path(note).write_text(str(os.getpid()))
    time.sleep(seconds)
    return os.getpid()


@offload(memory=64 * MEBIBYTE)
def hoard() -> int:
    kept = []
    while True:
        kept.append(bytearray(MEBIBYTE))


@offload(memory=64 * MEBIBYTE)
def grab(mebibytes: int) -> int:
    return len(bytes(mebibytes * MEBIBYTE))


@offload()
def leave(status: int) -> None:
    os._exit(status)


@pytest.fixture
def single() -> Iterator[ProcessExecutor]:
    workers = ProcessExecutor(1)
    with use_executor(workers):
        yield workers
    workers.close()


@pytest.fixture(autouse=True)
def chosen(local: ProcessExecutor) -> Iterator[ProcessExecutor]:
    with use_executor(local):
        yield local


async def ended(call: Awaitable[object]) -> BaseException:
    (end,) = await asyncio.gather(call, return_exceptions=True)
    assert isinstance(end, BaseException)
    return end


def _parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.slow
async def test_a_large_value_is_transferred_completely() -> None:
    value = os.urandom(5 * MEBIBYTE)
    assert await echo(value) == value


@pytest.mark.slow
async def test_runaway_calls_are_ended_and_do_not_disturb_their_neighbours() -> None:
    runaways = [ended(call()) for call in (spin, backtrack, power, sleep)]
    async with asyncio.timeout(NEVER / 20):
        *ends, values = await asyncio.gather(*runaways, asyncio.gather(*(echo(number) for number in range(200))))
    kinds = [(type(end), end.kind) for end in ends if isinstance(end, BudgetSpent | WorkerLost)]
    assert kinds == [*[(BudgetSpent, "cpu_spent")] * 3, (WorkerLost, "worker_timeout")]
    assert isinstance(ends[-1], WorkerLost)
    assert ends[-1].retryable
    assert values == list(range(200))


@pytest.fixture
def busy_core() -> Iterator[None]:
    """Run 20 programs on the first core."""
    program = "import os\nos.sched_setaffinity(0, {0})\nwhile True: pass"
    with ExitStack() as stack:
        for _ in range(20):
            busy = stack.enter_context(subprocess.Popen([sys.executable, "-c", program]))
            stack.callback(busy.kill)
        yield


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.usefixtures("single", "busy_core")
async def test_a_call_on_a_busy_machine_takes_as_long_as_it_needs() -> None:
    began = time.monotonic()
    assert await work_on_one_core(0.6)
    # The timeout of the call ended long before.
    assert time.monotonic() - began > MIN_IDLE_SECONDS


@pytest.mark.slow
async def test_the_cpu_time_of_a_started_process_counts() -> None:
    assert await delegate(0.1) == 0
    end = await ended(delegate(NEVER))
    assert isinstance(end, BudgetSpent)
    assert end.kind == "cpu_spent"


async def test_a_call_that_exceeds_its_memory_limit_raises_budget_spent_and_another_is_left_alone() -> None:
    for call in (hoard(), grab(500)):
        end = await ended(call)
        assert isinstance(end, BudgetSpent)
        assert end.kind == "memory_spent"
        assert "64 MiB of memory" in str(end)
    assert await grab(32) == 32 * MEBIBYTE


async def test_a_killed_worker_costs_the_one_call_it_runs(tmp_path: Path) -> None:
    note = tmp_path / "note"
    lost = asyncio.create_task(ended(pause(NEVER, str(note))))
    good = asyncio.create_task(pause(0.5))
    victim = await read_note(note)
    os.kill(victim, signal.SIGKILL)
    end = await lost
    assert isinstance(end, WorkerLost)
    assert (end.kind, end.retryable) == ("worker_killed", True)
    assert await good != victim
    assert victim not in await asyncio.gather(process_id(), process_id())


@pytest.mark.usefixtures("single")
@pytest.mark.slow
async def test_a_worker_killed_while_idle_costs_no_call() -> None:
    for _ in range(5):
        os.kill(await process_id(), signal.SIGKILL)
        assert await echo("served") == "served"


@pytest.mark.slow
async def test_workers_killed_again_and_again_cost_only_the_calls_they_ran() -> None:
    good = lost = 0
    for number in range(40):
        calls = [asyncio.create_task(pause(0.01 * (number % 3))) for _ in range(3)]
        victim = await process_id()
        os.kill(victim, signal.SIGKILL)
        for end in await asyncio.gather(*calls, return_exceptions=True):
            lost += isinstance(end, WorkerLost)
            good += isinstance(end, int)
    assert good + lost == 120
    assert good > lost


@pytest.mark.slow
@pytest.mark.usefixtures("single")
async def test_losing_the_process_that_starts_workers_costs_no_call(tmp_path: Path) -> None:
    note = tmp_path / "note"
    running = asyncio.create_task(pause(0.3, str(note)))
    worker = await read_note(note)
    os.kill(_parent(worker), signal.SIGKILL)
    assert await running == worker
    os.kill(worker, signal.SIGKILL)
    assert await process_id() != worker


async def test_a_worker_that_exits_by_itself_is_lost() -> None:
    end = await ended(leave(0))
    assert isinstance(end, WorkerLost)
    assert await echo("replaced") == "replaced"


@pytest.mark.slow
@pytest.mark.usefixtures("single")
async def test_a_cancelled_call_frees_its_place_and_ends_its_worker(tmp_path: Path) -> None:
    note = tmp_path / "note"
    call = asyncio.create_task(pause(NEVER, str(note)))
    worker = await read_note(note)
    call.cancel()
    assert isinstance(await ended(call), asyncio.CancelledError)
    assert await echo("next") == "next"
    await wait_until_gone(worker)


@pytest.mark.slow
@pytest.mark.usefixtures("single")
async def test_a_call_cancelled_while_it_waits_leaves_the_running_one_alone(tmp_path: Path) -> None:
    note = tmp_path / "note"
    running = asyncio.create_task(pause(0.3, str(note)))
    worker = await read_note(note)
    waiting = asyncio.create_task(pause(0.0))
    await asyncio.sleep(0)
    waiting.cancel()
    assert await running == worker
    assert await process_id() == worker
