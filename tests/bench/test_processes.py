"""CPU and memory of processes, as the operating system reports them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import psutil
import pytest

from gymsdk.bench import processes

BUSY = """
import time
ends = time.process_time() + 0.3
while time.process_time() < ends:
    pass
"""

KEEPS = "import sys; held = bytearray(30_000_000); print('there', flush=True); sys.stdin.read()"

PARENT = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", {BUSY!r}], check=True)
child = subprocess.Popen([sys.executable, "-c", {KEEPS!r}])
child.wait()
"""


@pytest.fixture
def start_process() -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Return a function that runs code in a process and waits for its first output; the test stops the process."""
    started = []

    def begin(code: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "there\n"
        return process

    yield begin
    for process in started:
        process.communicate()


def test_a_process_reports_its_cpu_and_memory_and_those_of_its_children(
    start_process: Callable[[str], subprocess.Popen[str]],
) -> None:
    alone = processes.measure_process(start_process(BUSY + KEEPS).pid)
    assert 0.28 <= alone.cpu < 2.0
    assert alone.memory > 30.0
    assert (alone.children_cpu, alone.children_memory) == (0.0, 0.0)
    parent = start_process(PARENT)
    used = processes.measure_process(parent.pid)
    assert used.cpu < 0.28 <= used.children_cpu
    assert used.memory < 30.0 < used.children_memory


SHARING = """
import os, sys
held = bytearray(b"x" * 40_000_000)
child = os.fork()
if child == 0:
    sys.stdin.read()
    os._exit(0)
print("there", flush=True)
os.waitpid(child, 0)
"""


HAS_PSS = processes.choose_memory_measure([os.getpid()]) == "PSS"


@pytest.mark.skipif(not HAS_PSS, reason="this system does not report the PSS")
def test_memory_that_processes_share_counts_once(start_process: Callable[[str], subprocess.Popen[str]]) -> None:
    used = processes.measure_process(start_process(SHARING).pid, "PSS")
    assert 15.0 < used.children_memory < 40.0
    assert 40.0 < used.memory + used.children_memory < 70.0


def test_without_the_pss_the_resident_memory_counts(start_process: Callable[[str], subprocess.Popen[str]]) -> None:
    used = processes.measure_process(start_process(SHARING).pid, "RSS")
    assert min(used.memory, used.children_memory) > 40.0


def test_the_pss_is_used_only_if_the_system_reports_it_for_all_processes() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert processes.choose_memory_measure([os.getpid(), ended.pid]) == "RSS"


def test_a_zombie_does_not_count_as_running_and_a_missing_process_raises() -> None:
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not processes.is_running(process.pid)
    process.wait()
    assert not processes.is_running(process.pid)
    with pytest.raises(ProcessLookupError, match=f"process {process.pid} does not exist"):
        processes.measure_process(process.pid)


def test_a_process_that_hides_its_pss_reports_its_resident_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(process: psutil.Process) -> None:
        raise psutil.AccessDenied(process.pid)

    monkeypatch.setattr(psutil.Process, "memory_full_info", refuse)
    assert processes.choose_memory_measure([os.getpid()]) == "RSS"
    assert processes.measure_process(os.getpid(), "PSS").memory > 10.0
