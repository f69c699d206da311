"""The CPU time of processes and threads tells what works from what hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from gymsdk.workers import cpu_watch
from gymsdk.workers.cpu_watch import CpuWatch, ThreadClock, read_own_cpu_seconds, read_tree_cpu_seconds

SPIN = "while True: pass"
SLEEP = "import time; print(flush=True); time.sleep(999)"
DELEGATE = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SPIN!r}])"


@contextmanager
def run_program(program: str) -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", program], process_group=0, stdout=subprocess.PIPE) as process:
        try:
            yield process.pid
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def wait_until_child_runs(process: int) -> None:
    while read_tree_cpu_seconds(process) - read_own_cpu_seconds(process) < 0.05:
        time.sleep(0.01)


def check_often(watch: CpuWatch, times: int = 4, seconds: float = 0.1) -> list[str | None]:
    """Return the results of some checks; each counts as a second."""
    results = []
    for _ in range(times):
        results.append(watch.check())
        time.sleep(seconds)
    return results


def test_a_process_that_waits_hangs_and_one_that_works_does_not() -> None:
    with run_program(SLEEP) as sleeping, run_program(SPIN) as spinning:
        time.sleep(0.5)
        watches = [
            CpuWatch(partial(read_tree_cpu_seconds, process), cpu=100, idle=2) for process in (sleeping, spinning)
        ]
        assert [check_often(watch) for watch in watches] == [[None, None, "idle", "idle"], [None] * 4]


def test_the_work_of_a_started_process_counts_if_it_is_asked_for() -> None:
    with run_program(DELEGATE) as process:
        wait_until_child_runs(process)
        own, tree = (
            CpuWatch(partial(read, process), cpu=100, idle=2) for read in (read_own_cpu_seconds, read_tree_cpu_seconds)
        )
        assert [check_often(own)[-1], check_often(tree)[-1]] == ["idle", None]
        spent = CpuWatch(partial(read_tree_cpu_seconds, process), cpu=0.05, idle=100)
        assert check_often(spent)[-1] == "cpu"


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
    assert check_often(watch, times=3, seconds=0) == [None, None, None]
    thread = threading.Thread(target=clock.measure, args=(run,))
    thread.start()
    try:
        assert check_often(watch)[-1] == expected
    finally:
        stop.set()
        thread.join()
    assert clock.read() is None


def test_a_process_of_an_earlier_call_in_the_thread_is_activity_but_not_the_calls_work() -> None:
    """A sandbox that `reset` starts may work for `verify`, or for another episode that used the same thread before."""
    clock, go, stop = ThreadClock(), threading.Event(), threading.Event()

    def run() -> None:
        with run_program(SPIN):
            time.sleep(0.1)
            clock.measure(lambda: (go.set(), stop.wait()))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert go.wait(10)
        watch = CpuWatch(clock.read, cpu=0.1, idle=2, read_activity=clock.read_activity)
        assert check_often(watch, times=5) == [None] * 5
        assert check_often(CpuWatch(clock.read_activity, cpu=0.1, idle=2), times=5)[-1] == "cpu"
    finally:
        stop.set()
        thread.join()


def test_a_process_that_the_call_starts_is_its_work() -> None:
    clock, go, stop = ThreadClock(), threading.Event(), threading.Event()

    def call() -> None:
        with run_program(SPIN):
            go.set()
            stop.wait()

    thread = threading.Thread(target=clock.measure, args=(call,))
    thread.start()
    try:
        assert go.wait(10)
        assert check_often(CpuWatch(clock.read, cpu=0.1, idle=2), times=5)[-1] == "cpu"
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
