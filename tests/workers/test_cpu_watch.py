"""The CPU time of processes and threads tells what works from what hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from gymsdk.workers import cpu_watch
from gymsdk.workers.cpu_watch import CpuWatch, ThreadClock, read_own_cpu_seconds, read_tree_cpu_seconds

SPIN = "while True: pass"
SLEEP = "import time; print(flush=True); time.sleep(999)"
DELEGATE = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SPIN!r}])"


@contextmanager
def run_program(program: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", program], process_group=0, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def wait_until_child_runs(process: int) -> None:
    while read_tree_cpu_seconds(process) - read_own_cpu_seconds(process) < 0.05:
        time.sleep(0.01)


def wait_for_work(read: Callable[[], float | None]) -> None:
    """Wait until more CPU time was used: how long that takes depends on what else the machine does."""
    before = read() or 0.0
    while (read() or 0.0) - before < 0.02:
        time.sleep(0.01)


def check_often(
    watch: CpuWatch, *, times: int = 4, wait: Callable[[], object] = lambda: time.sleep(0.1)
) -> list[str | None]:
    """Return the results of some checks, which count as a second; *wait* between two of them."""
    results = []
    for _ in range(times):
        results.append(watch.check())
        wait()
    return results


def wait_for_excess(watch: CpuWatch) -> str | None:
    """Return the limit that is exceeded first."""
    while watch.check() is None:
        time.sleep(0.05)
    return watch.excess


def test_a_process_that_waits_hangs_and_one_that_works_does_not() -> None:
    with run_program(SLEEP) as sleeping, run_program(SPIN) as spinning:
        assert sleeping.stdout.readline(), "it waits from then on"
        reads = [partial(read_tree_cpu_seconds, process.pid) for process in (sleeping, spinning)]
        hung, working = (CpuWatch(read, cpu=100, idle=2) for read in reads)
        assert check_often(hung) == [None, None, "idle", "idle"]
        assert check_often(working, wait=partial(wait_for_work, reads[1])) == [None] * 4


def test_the_work_of_a_started_process_counts_if_it_is_asked_for() -> None:
    with run_program(DELEGATE) as process:
        wait_until_child_runs(process.pid)
        own, tree = (partial(read, process.pid) for read in (read_own_cpu_seconds, read_tree_cpu_seconds))
        assert wait_for_excess(CpuWatch(own, cpu=100, idle=2)) == "idle"
        assert check_often(CpuWatch(tree, cpu=100, idle=2), wait=partial(wait_for_work, tree)) == [None] * 4
        assert wait_for_excess(CpuWatch(tree, cpu=0.05, idle=1000)) == "cpu"


def test_processes_that_run_one_after_another_do_not_hang() -> None:
    """A long process is followed by short ones, each with less CPU time than the first."""
    readings = [0.0, 60.0, *(0.1 + second % 3 for second in range(300))]
    watch = CpuWatch(iter(readings).__next__, cpu=1000, idle=10)
    assert {watch.check() for _ in readings} == {None}
    watch = CpuWatch(iter([*readings, *[0.1] * 20]).__next__, cpu=1000, idle=10)
    assert [watch.check() for _ in range(len(readings) + 20)][-1] == "idle"


@pytest.mark.parametrize(("work", "expected"), [(lambda: sum(range(10**6)), None), (lambda: time.sleep(0.1), "idle")])
def test_the_clock_of_a_thread_is_its_own(work: object, expected: str | None) -> None:
    clock, stop = ThreadClock(), threading.Event()

    def run() -> None:
        while not stop.is_set():
            work()  # type: ignore[operator]

    watch = CpuWatch(clock.read, cpu=100, idle=2)
    assert check_often(watch, times=3, wait=lambda: None) == [None, None, None]
    thread = threading.Thread(target=clock.measure, args=(run,))
    thread.start()
    try:
        if expected is None:
            assert check_often(watch, wait=partial(wait_for_work, clock.read)) == [None] * 4
        else:
            assert wait_for_excess(watch) == expected
    finally:
        stop.set()
        thread.join()
    assert clock.read() is None


@pytest.mark.parametrize("is_started_by_the_call", [False, True])
def test_a_process_of_an_earlier_call_in_the_thread_is_activity_but_not_the_calls_work(
    is_started_by_the_call: bool,
) -> None:
    """A sandbox that `reset` starts may work for `verify`, or for another episode that used the same thread before."""
    clock, go, stop = ThreadClock(), threading.Event(), threading.Event()

    def call() -> None:
        go.set()
        stop.wait()

    def run() -> None:
        with run_program(SPIN):
            time.sleep(0.1)
            call() if is_started_by_the_call else clock.measure(call)

    thread = threading.Thread(target=partial(clock.measure, run) if is_started_by_the_call else run)
    thread.start()
    try:
        assert go.wait(10)
        if is_started_by_the_call:
            assert wait_for_excess(CpuWatch(clock.read, cpu=0.1, idle=1000)) == "cpu"
        else:
            watch = CpuWatch(clock.read, cpu=0.1, idle=2, read_activity=clock.read_activity)
            assert check_often(watch, times=8, wait=partial(wait_for_work, clock.read_activity)) == [None] * 8
        assert wait_for_excess(CpuWatch(clock.read_activity, cpu=0.1, idle=1000)) == "cpu"
    finally:
        stop.set()
        thread.join()


def test_without_cpu_times_the_time_that_passes_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = CpuWatch(lambda: 0.0, cpu=2.0, idle=3.0)
    not_begun = CpuWatch(lambda: None, cpu=2.0, idle=3.0)
    monkeypatch.setattr(cpu_watch, "CAN_READ", False)
    assert [watch.check() for _ in range(5)] == [None] * 4 + ["idle"]
    assert watch.describe_hang() == "it has not returned after 5 s"
    assert {not_begun.check() for _ in range(9)} == {None}
