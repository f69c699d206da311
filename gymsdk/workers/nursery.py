"""The nursery: a process that has imported what workers need, and forks each of them from itself.

It is a fresh interpreter that never sees the host's `__main__`, so scripts need no guard.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

ANSWER_SECONDS = 60.0
"""How long the nursery may take to import what it is told and to fork."""

MOST_BYTES = 2**18


@dataclass(frozen=True)
class _Fork:
    """Fork a worker, after importing *modules* by way of this *path*."""

    modules: tuple[str, ...]
    path: tuple[str, ...]
    folder: str


@dataclass(frozen=True)
class _End:
    """Kill this worker."""

    process: int


class Nursery:
    """The host's end: started at the first fork, and again where it was lost."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._cold = False

    def fork(self, line: socket.socket, modules: Collection[str]) -> int:
        """Give the process id of a new worker that has taken over *line*, with *modules* imported."""
        with line, self._lock:
            wanted = () if self._cold else tuple(modules)
            request = _Fork(wanted, tuple(sys.path), str(Path.cwd()))
            control = self._control or self._start()
            try:
                return self._ask(control, request, line)
            except OSError as error:
                self._stop()
                # It ended or hung over this request: what it imports ahead may be why. Workers import for themselves.
                self._cold = self._cold or not isinstance(error, BrokenPipeError)
                raise

    def kill(self, process: int) -> int:
        """Kill a worker and give the status it ended with, 0 where that is not known."""
        with self._lock:
            if self._control is None:
                return 0
            try:
                return self._ask(self._control, _End(process))
            except OSError:
                self._stop()
                return 0

    def close(self, workers: Collection[int]) -> None:
        """End the nursery and these *workers* of it, whatever it is at just now."""
        if self._server is None or self._server.poll() is not None:
            return
        for worker in filter(None, workers):
            os.kill(worker, signal.SIGKILL)  # not yet reaped by the nursery, so the number is still its own
        self._stop()

    def abandon(self) -> None:
        """Let go of the nursery in a forked copy of the host, whose child it is not."""
        if self._control is not None and self._server is not None:
            self._control.close()
            self._server.returncode = 0

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(ANSWER_SECONDS)
        entry = f"from {__name__} import serve; serve({theirs.fileno()})"
        code = f"import sys; sys.path[:] = {sys.path!r}; {entry}"
        with theirs:
            self._server = subprocess.Popen(  # noqa: S603 - this very interpreter
                [sys.executable, "-c", code], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )
        self._control = ours
        return ours

    @staticmethod
    def _ask(control: socket.socket, request: _Fork | _End, *lines: socket.socket) -> int:
        socket.send_fds(control, [pickle.dumps(request)], [line.fileno() for line in lines])
        answer = control.recv(MOST_BYTES)
        if not answer:
            raise ConnectionError("the process that starts workers has ended")
        return int(answer)

    def _stop(self) -> None:
        control, self._control = self._control, None
        server, self._server = self._server, None
        if control is not None:
            control.close()
        if server is not None:
            server.kill()
            server.wait()


def serve(descriptor: int) -> None:
    """Be the nursery that takes its requests from *descriptor*, until the host is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Libraries imported ahead may keep threads; Python warns of forking beside them, and these have their own care.
    warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*fork")
    importlib.import_module("gymsdk.workers.calls")
    control = socket.socket(fileno=descriptor)
    tried: set[str] = set()
    workers: set[int] = set()
    while True:
        message, lines, _, _ = socket.recv_fds(control, MOST_BYTES, 1)
        if not message:
            return
        request = pickle.loads(message)  # noqa: S301 - the host wrote it
        if isinstance(request, _Fork):
            _import_ahead(request, tried)
            answer = _fork(control, lines[0])
            workers.add(answer)
        else:
            # Another nursery's worker is not ours to kill: by now its number may be anybody's.
            answer = _end(request.process) if request.process in workers else 0
            workers.discard(request.process)
        control.send(str(answer).encode())


def _import_ahead(request: _Fork, tried: set[str]) -> None:
    sys.path[:] = request.path
    os.chdir(request.folder)
    for module in request.modules:
        if module not in tried:
            tried.add(module)
            # The worker that needs it imports it again, and reports what is wrong with it.
            with contextlib.suppress(Exception, SystemExit):
                importlib.import_module(module)


def _fork(control: socket.socket, line: int) -> int:
    process = os.fork()
    if process == 0:
        control.close()
        _work(line)
    os.close(line)
    return process


def _work(line: int) -> NoReturn:
    from gymsdk.workers import calls

    try:
        calls.serve(socket.socket(fileno=line))
    except ConnectionError:  # the host is gone
        os._exit(1)
    except BaseException:  # noqa: BLE001 - said here, for nobody is left to catch it
        traceback.print_exc()
    finally:
        os._exit(1)


def _end(worker: int) -> int:
    os.kill(worker, signal.SIGKILL)
    _, status = os.waitpid(worker, 0)
    return os.waitstatus_to_exitcode(status)
