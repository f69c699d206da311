"""Benchmarks with servers in child processes."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest
from sums_environment import PLAIN

from gymsdk.bench import processes
from gymsdk.bench.load import BenchPlan, measure
from gymsdk.bench.report import BenchResult
from gymsdk.bench.stage import POLICY, SERVERS, start_policy, start_servers
from gymsdk.errors import UsageError

OFFLOADED = f"""{PLAIN}
@offload(timeout=10.0, cpu=5.0)
def same(one, other):
    return one == other

@hookimpl
def tasks(split: Literal["train"]):
    for number in range(1000):
        yield Task.ask(f"What is {{number}} + 1?", answer=str(number + 1), filler="x" * 20_000)

@hookimpl
async def verify(task, transcript):
    return Verdict(reward=float(await same(transcript.reply, task.row()["answer"])))

@hookimpl
def solve(task):
    return Message(content=task.row()["answer"])
"""


@pytest.fixture(autouse=True)
def _here(installed: Callable[..., Path]) -> None:
    installed()
    installed("offloaded", OFFLOADED)


async def all_of(found: AsyncIterator[BenchResult]) -> list[BenchResult]:
    return [result async for result in found]


async def test_an_endpoint_replays_the_oracle_by_default() -> None:
    [served] = await all_of(measure(BenchPlan(environments={"tool_call": {}}, concurrency_levels=(1, 4), rollouts=12)))
    assert [load.concurrency for load in served.loads] == [1, 4]
    assert served.ready is not None
    assert served.ready > 0
    for load in served.loads:
        assert load.is_correct
        assert load.expected == 1.0
        assert load.requests == {"tool_call_simple_agent": 1.0, "policy": load.calls}
        assert {SERVERS, POLICY} == load.memory.keys()


async def test_a_scripted_model_plays_in_the_servers_process() -> None:
    bench = BenchPlan(
        environments={"sums": {"digits": "2"}}, concurrency_levels=(2,), rollouts=20, model="scripted/oracle:0.5"
    )
    [served] = await all_of(measure(bench))
    [load] = served.loads
    assert 0 < (load.expected or 0) < 1
    assert (load.reward, load.wrong) == (load.expected, 0)
    assert load.requests == {"sums_simple_agent": 1.0}
    assert load.memory.keys() == {SERVERS}


async def test_the_start_error_of_the_servers_is_reported() -> None:
    with pytest.raises(UsageError, match="no environment named 'nosuch'"):
        async with start_servers(["nosuch"], model="scripted/oracle"):
            pass
    with pytest.raises(UsageError, match="scripted/replay"):
        async with start_policy(Path("nosuch.jsonl")):
            pass


async def test_the_servers_stop_with_the_context() -> None:
    async with start_servers(["sums"], model="scripted/oracle") as stage:
        assert processes.is_running(stage.pids[SERVERS])
    assert not processes.is_running(stage.pids[SERVERS])


def test_a_child_process_ends_with_its_parent() -> None:
    command = [sys.executable, "-m", "gymsdk.bench.child", "serve", "sums", "--port", "0", "--json"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout.readline()
    child.communicate(timeout=20)
    assert child.returncode == 0


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_minute_of_load_and_killed_workers_leave_nothing_behind() -> None:
    over, killed = threading.Event(), []

    def kill() -> None:
        while not over.wait(7.0):
            for worker in filter(_is_worker, psutil.Process().children(recursive=True)):
                worker.kill()
                killed.append(worker.pid)

    killer = threading.Thread(target=kill)
    killer.start()
    bench = BenchPlan(environments={"offloaded": {}}, concurrency_levels=(16,), minutes=1.0)
    try:
        [served] = await all_of(measure(bench))
    finally:
        over.set()
        killer.join()
    [load] = served.loads
    assert len(killed) > 3
    assert (load.failures, load.wrong, load.open, load.reward) == ({}, 0, 0, 1.0)
    # Halfway through, the cache of responses for repeated requests has reached its maximum size.
    for name, memory in load.memory.items():
        assert memory.after - memory.half < 8.0, name
    assert not [worker for worker in killed if processes.is_running(worker)]


def _is_worker(process: psutil.Process) -> bool:
    """Return whether the process is a forked worker, according to its command line."""
    try:
        return "gymsdk.workers.processes" in " ".join(process.cmdline()) and not process.children()
    except psutil.NoSuchProcess:
        return False
