"""Start the measured processes, and read their CPU time and memory from Linux."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TICKS = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
SAMPLE_SECONDS = 0.25
"""Seconds between two samples of the memory."""

STOP_SECONDS = 60
"""Seconds that a process gets to end after SIGTERM."""

LAST_OUTPUT_SECONDS = 1
"""Seconds to wait for the last output of a process that has ended."""

STOP_NOTICE = "stopping; press Ctrl-C again to stop at once\n"
"""The line that `gymsdk` commands print when a signal stops them."""

HERE = Path(__file__).parent


def read_cpu(pid: int) -> float:
    """Return the CPU time, user and system, of a process and its ended threads in seconds; 0.0 if it has ended."""
    try:
        # The number of another process's CPU clock, as clock_getcpuclockid(3) computes it. It counts nanoseconds, where
        # /proc/PID/stat counts hundredths of a second.
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0


@dataclass(frozen=True)
class ProcessTree:
    """A process and its descendants."""

    pid: int

    def list_pids(self) -> list[int]:
        """Return the process ids of the process and its descendants."""
        pids = [self.pid]
        for pid in pids:
            for thread in Path(f"/proc/{pid}/task").glob("*/children"):
                pids += map(int, _read(thread).split())
        return pids

    def read_cpu(self) -> float:
        """Return the CPU time in seconds of the tree, with the descendants that have ended."""
        return sum(read_cpu(pid) + _read_ended_children(pid) for pid in self.list_pids())

    def read_memory(self) -> int:
        """Return the sum of the resident memory of the processes in bytes."""
        return sum(_read_memory(pid) for pid in self.list_pids())

    def count_files(self) -> int:
        """Return the number of open file descriptors."""
        return sum(_count_entries(Path(f"/proc/{pid}/fd")) for pid in self.list_pids())

    def count_threads(self) -> int:
        """Return the number of threads."""
        return sum(_count_entries(Path(f"/proc/{pid}/task")) for pid in self.list_pids())


def _read(path: Path) -> str:
    """Return the content of a file, or nothing if its process has ended."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _count_entries(folder: Path) -> int:
    try:
        return sum(1 for _ in folder.iterdir())
    except OSError:
        return 0


def _read_ended_children(pid: int) -> float:
    fields = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return (int(fields[13]) + int(fields[14])) / TICKS if fields else 0.0


def _read_memory(pid: int) -> int:
    fields = _read(Path(f"/proc/{pid}/statm")).split()
    return int(fields[1]) * PAGE_BYTES if fields else 0


@contextmanager
def sample_peak_memory(tree: ProcessTree) -> Iterator[list[int]]:
    """Sample the memory of *tree* while the context is open; the list then has the highest sample in bytes."""
    peak, stopped = [tree.read_memory()], threading.Event()

    def sample() -> None:
        while not stopped.wait(SAMPLE_SECONDS):
            peak[0] = max(peak[0], tree.read_memory())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peak
    finally:
        stopped.set()
        thread.join()


@dataclass(frozen=True)
class Server:
    """A running process that has printed a line of JSON.

    Attributes:
        tree: The process and its descendants.
        process: The process.
        ready: The line of JSON.
    """

    tree: ProcessTree
    process: subprocess.Popen[str]
    ready: Mapping[str, Any]

    def exchange(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Write *message* to the standard input of the process as a line of JSON and return the line it prints.

        Raises:
            RuntimeError: The process has ended.
        """
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()
        return _read_line(self.process)


def _copy_errors(output: int) -> None:
    """Copy the standard error of a process, except `STOP_NOTICE` and empty lines, to that of this process."""
    with os.fdopen(output, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.strip() and line != STOP_NOTICE:
                sys.stderr.write(line)


def _read_line(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{' '.join(map(str, process.args))} ended with status {process.wait()}")  # type: ignore[arg-type]  # a list of strings
    message: dict[str, Any] = json.loads(line)
    return message


@contextmanager
def run_server(command: Sequence[str], *, environ: Mapping[str, str] | None = None) -> Iterator[Server]:
    """Run *command* until the context ends, and wait for the line of JSON that it prints when it is ready.

    Its standard error is copied to that of this process, without the line that says that it is stopping. The command
    runs in its own process group, and no process of this group outlives the context.
    """
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    output, errors = os.pipe()
    try:
        process = subprocess.Popen(command, env={**os.environ, **(environ or {})}, stderr=errors, **options)  # type: ignore[call-overload]  # options by name
    except BaseException:
        os.close(output)
        raise
    finally:
        os.close(errors)
    with process:
        copying = threading.Thread(target=_copy_errors, args=(output,), daemon=True)
        copying.start()
        try:
            yield Server(ProcessTree(process.pid), process, _read_line(process))
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_SECONDS)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                copying.join(LAST_OUTPUT_SECONDS)


def stop_process(process: subprocess.Popen[Any], seconds: float = STOP_SECONDS) -> None:
    """Stop a process with SIGTERM, and kill it if it has not ended after *seconds*."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()


@contextmanager
def run_stub() -> Iterator[str]:
    """Run the stub model server and yield its URL."""
    with run_server([sys.executable, str(HERE / "stub.py")]) as stub:
        yield stub.ready["url"]


@contextmanager
def run_floor(environment: str, stub: str) -> Iterator[Server]:
    """Run the floor for an environment, with the stub model server at the URL *stub*."""
    with run_server([sys.executable, str(HERE / "floor.py"), environment, stub]) as floor:
        yield floor


@contextmanager
def run_gymsdk_serve(
    environment: str, base_url: str, *options: str, checkout: str = "", report: Path | None = None
) -> Iterator[Server]:
    """Run `gymsdk serve` with the model at *base_url*.

    Args:
        environment: The name of the environment.
        base_url: The base URL of the stub, as in `http://127.0.0.1:8900/v1`.
        *options: Further options of the command.
        checkout: The source tree to import gymsdk from. Default: the installed one.
        report: The file to write what `watched.py` records to. Default: the command is not watched.
    """
    serve = ["serve", environment, "--port", "0", "--json", *build_model_options(base_url), *options]
    command = build_watched_command(report, *serve) if report else [sys.executable, "-m", "gymsdk", *serve]
    with run_server(command, environ=build_environ(checkout)) as server:
        yield server


def build_model_options(base_url: str) -> list[str]:
    """Return the options of `gymsdk serve` and `gymsdk rollout` that select the stub as the model."""
    return ["--model", "endpoint/stub", "--base-url", base_url, "--api", "responses"]


def build_watched_command(report: Path, *arguments: str) -> list[str]:
    """Return the command line of a `gymsdk` command that writes what `watched.py` records to the file *report*."""
    return [sys.executable, str(HERE / "watched.py"), str(report), *arguments]


def build_environ(checkout: str) -> dict[str, str]:
    """Return the environment variables that make Python import gymsdk from the source tree *checkout*."""
    # Without PYTHONSAFEPATH, Python would import gymsdk from the current folder if that is a source tree.
    return {"PYTHONPATH": checkout, "PYTHONSAFEPATH": "1"} if checkout else {}


def get_agent_url(server: Server, environment: str) -> str:
    """Return the URL of the agent server of an environment."""
    url: str = server.ready["servers"][f"{environment}_simple_agent"]["url"]
    return url


def prepare_process() -> None:
    """Raise this process's soft limit on open files to the hard limit, and stop the started processes after SIGTERM."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
