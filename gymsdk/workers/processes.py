"""Local workers: warm processes that run offloaded calls, one at a time each, and are replaced when one is lost."""

from __future__ import annotations

import asyncio
import atexit
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
from typing import Any, NoReturn, ParamSpec, TypeVar

from gymsdk import profiling
from gymsdk.deadlines import pause_deadline
from gymsdk.errors import BudgetSpent, Failed, WorkerLost
from gymsdk.threads import CrossLoopSemaphore, ThreadPool
from gymsdk.workers.calls import (
    LENGTH_PREFIX_BYTES,
    CallResult,
    execute_call,
    frame_message,
    load_function,
    pickle_by_value,
)
from gymsdk.workers.offload import Work, list_work

FORK_SECONDS = 60.0
"""How long the nursery may take to import what it is told and to fork."""

MAX_MESSAGE_BYTES = 2**18


@dataclass(frozen=True)
class _ForkRequest:
    """Fork a worker, after importing *modules* by way of this *path*."""

    modules: tuple[str, ...]
    path: tuple[str, ...]
    folder: str


@dataclass(frozen=True)
class _KillRequest:
    """Kill this worker."""

    process: int


class ForkServer:
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
            request = _ForkRequest(wanted, tuple(sys.path), str(Path.cwd()))
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
                return self._ask(self._control, _KillRequest(process))
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
        ours.settimeout(FORK_SECONDS)
        entry = f"from {__name__} import serve; serve({theirs.fileno()})"
        code = f"import sys; sys.path[:] = {sys.path!r}; {entry}"
        with theirs:
            self._server = subprocess.Popen(  # noqa: S603 - this very interpreter
                [sys.executable, "-c", code], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )
        self._control = ours
        return ours

    @staticmethod
    def _ask(control: socket.socket, request: _ForkRequest | _KillRequest, *lines: socket.socket) -> int:
        socket.send_fds(control, [pickle.dumps(request)], [line.fileno() for line in lines])
        answer = control.recv(MAX_MESSAGE_BYTES)
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
        message, lines, _, _ = socket.recv_fds(control, MAX_MESSAGE_BYTES, 1)
        if not message:
            return
        request = pickle.loads(message)  # noqa: S301 - the host wrote it
        if isinstance(request, _ForkRequest):
            _preload_modules(request, tried)
            answer = _fork_worker(control, lines[0])
            workers.add(answer)
        else:
            # Another nursery's worker is not ours to kill: by now its number may be anybody's.
            answer = _kill_worker(request.process) if request.process in workers else 0
            workers.discard(request.process)
        control.send(str(answer).encode())


def _preload_modules(request: _ForkRequest, tried: set[str]) -> None:
    sys.path[:] = request.path
    os.chdir(request.folder)
    for module in request.modules:
        if module not in tried:
            tried.add(module)
            # The worker that needs it imports it again, and reports what is wrong with it.
            with contextlib.suppress(Exception, SystemExit):
                importlib.import_module(module)


def _fork_worker(control: socket.socket, line: int) -> int:
    process = os.fork()
    if process == 0:
        control.close()
        _run_worker(line)
    os.close(line)
    return process


def _run_worker(line: int) -> NoReturn:
    from gymsdk.workers import calls

    try:
        calls.run_worker(socket.socket(fileno=line))
    except ConnectionError:  # the host is gone
        os._exit(1)
    except BaseException:  # noqa: BLE001 - said here, for nobody is left to catch it
        traceback.print_exc()
    finally:
        os._exit(1)


def _kill_worker(worker: int) -> int:
    os.kill(worker, signal.SIGKILL)
    _, status = os.waitpid(worker, 0)
    return os.waitstatus_to_exitcode(status)


P = ParamSpec("P")
R = TypeVar("R")

WORKER_START_SECONDS = 60.0
"""How long a worker may take to start and to import what it needs."""

MAX_START_ATTEMPTS = 3
"""How many workers are tried for a call, where they are lost before it begins."""

MAX_READ_BYTES = 2**20


class _WorkerNotReadyError(Exception):
    """The worker was lost before the call began, so another may take it; the message says how."""


class WorkerSlot:
    """The place of one worker: empty until a call needs it, and again once the worker is lost."""

    def __init__(self, nursery: ForkServer, starters: ThreadPool) -> None:
        self._nursery = nursery
        self._starters = starters
        self._line: socket.socket | None = None
        self._process = 0
        self._loaded: dict[str, bytes | None] = {}
        self._path: list[str] = []

    @property
    def is_empty(self) -> bool:
        """Whether the next call has to start a worker."""
        return self._line is None

    async def run(self, work: Work[..., object], code: bytes | None, arguments: bytes) -> CallResult:
        """Give the worker's answer to one call; where there is none, the worker is given up."""
        reason = ""
        for _ in range(MAX_START_ATTEMPTS):
            try:
                return await self._load(work, code) or await self._execute(work, arguments)
            except _WorkerNotReadyError as lost:
                reason = str(lost)
                self.discard()
            except BaseException:
                self.discard()
                raise
        raise WorkerLost(f"no worker could take {work.address}: {reason}", kind="worker_start", retryable=True)

    def discard(self) -> None:
        """Give the worker up: at once for this process, and soon after it is dead."""
        process = self.disconnect()
        if process:
            threading.Thread(target=self._nursery.kill, args=(process,), name="gymsdk-end", daemon=True).start()

    def disconnect(self) -> int:
        """Close the line to the worker, and give the process it was, 0 where there was none."""
        if self._line is not None:
            self._line.close()
        process, self._process = self._process, 0
        self._line, self._loaded = None, {}
        return process

    async def _load(self, work: Work[..., object], code: bytes | None) -> CallResult | None:
        if work.address in self._loaded and self._loaded[work.address] == code and self._path == sys.path:
            return None
        path = [*sys.path]
        try:
            async with asyncio.timeout(WORKER_START_SECONDS):
                line = self._line or await self._start()
                answer = await _call_worker(line, load_function, work.address, code, path)
        except (OSError, EOFError) as error:  # a timeout is an OSError
            raise _WorkerNotReadyError(f"it did not come to life ({error!r})") from error
        if answer[0] != "ready":
            return answer
        self._loaded[work.address], self._path = code, path
        return None

    async def _start(self) -> socket.socket:
        self._line, theirs = socket.socketpair()
        self._line.setblocking(False)
        modules = sorted({module for work in list_work() for module in work.modules})
        self._process = await self._starters.run(self._nursery.fork, theirs, modules)
        return self._line

    async def _execute(self, work: Work[..., object], arguments: bytes) -> CallResult:
        assert self._line is not None
        try:
            async with asyncio.timeout(work.timeout):
                with profiling.count_worker_cpu(self._process):
                    return await _call_worker(self._line, execute_call, work.address, arguments, work.cpu, work.memory)
        except TimeoutError:
            raise WorkerLost(
                f"{work.address} had not returned after {work.timeout:g} s, with processor time to spare",
                kind="worker_timeout",
                retryable=True,
            ) from None
        except ConnectionError as error:  # nobody has read the request
            raise _WorkerNotReadyError("it was killed while idle") from error
        except EOFError:
            await self._mourn(work)

    async def _mourn(self, work: Work[..., object]) -> NoReturn:
        process, self._process = self._process, 0
        status = await self._starters.run(self._nursery.kill, process)
        if status == -signal.SIGPROF:
            raise BudgetSpent(f"{work.address} used up its {work.cpu:g} s of processor time", kind="cpu_spent")
        raise WorkerLost(
            f"the worker running {work.address} was killed, or left (status {status})",
            kind="worker_killed",
            retryable=True,
        )


async def _call_worker(line: socket.socket, *request: object) -> CallResult:
    function, *arguments = request
    await asyncio.get_running_loop().sock_sendall(line, frame_message(pickle.dumps((function, arguments))))
    size = int.from_bytes(await _receive_exactly(line, LENGTH_PREFIX_BYTES), "big")
    answer: CallResult = pickle.loads(await _receive_exactly(line, size))  # noqa: S301 - our own worker wrote it
    return answer


async def _receive_exactly(line: socket.socket, size: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = bytearray()
    while len(data) < size:
        part = await loop.sock_recv(line, min(size - len(data), MAX_READ_BYTES))
        if not part:
            raise EOFError("the worker has ended")
        data += part
    return bytes(data)


class ProcessExecutor:
    """The executor of at most *count* worker processes, each started by the first call that finds none idle."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._permits = CrossLoopSemaphore(self._count)
        self._nursery = ForkServer()
        starters = ThreadPool(self._count)
        self._slots = [WorkerSlot(self._nursery, starters) for _ in range(self._count)]
        self._free = list(self._slots)
        atexit.register(self.close)

    def _begin_again(self) -> None:
        for slot in self._slots:
            slot.disconnect()
        self._nursery.abandon()
        self._begin()

    async def run(self, work: Work[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Give what the function returns, computed in a worker."""
        if self._process != os.getpid():
            self._begin_again()
        arguments = _pickle_for_worker((args, kwargs), work)
        code = None if work.importable else _pickle_for_worker(work.function, work)
        with pause_deadline():
            answer = await self._answer(work, code, arguments)
        return _unpack_result(answer, work)

    async def _answer(self, work: Work[..., object], code: bytes | None, arguments: bytes) -> CallResult:
        permits, free = self._permits, self._free
        await permits.acquire()
        slot = free.pop()
        try:
            answer = await slot.run(work, code, arguments)
            if answer[0] == "memory":
                slot.discard()  # what is left of its heap is not worth keeping
            return answer
        finally:
            free.insert(0 if slot.is_empty else len(free), slot)  # taken from the end, so a worker before a start
            permits.release()

    def close(self) -> None:
        """End the workers; a later call starts them anew."""
        if self._process == os.getpid():
            self._nursery.close([slot.disconnect() for slot in self._slots])


def _pickle_for_worker(content: object, work: Work[..., object]) -> bytes:
    try:
        return pickle_by_value(content)
    except Exception as error:
        message = f"{work.address} uses something that cannot be sent to a worker ({error}); pass it plain data"
        raise Failed(message, kind="offload") from error


def _unpack_result(answer: CallResult, work: Work[P, R]) -> R:
    word, body = answer
    if word == "memory":
        raise BudgetSpent(f"{work.address} used up its {work.memory >> 20} MiB of memory", kind="memory_spent")
    if word == "value":
        value: R = _unpickle_from_worker(body, work)
        return value
    if word == "error":
        error, text = _unpickle_from_worker(body, work)
        error.add_note(f"In the worker:\n{text}")
        raise error
    raise Failed(f"{work.address} {_unpickle_from_worker(body, work)}", kind="offload")


def _unpickle_from_worker(body: bytes, work: Work[..., object]) -> Any:
    try:
        return pickle.loads(body)  # noqa: S301 - our own worker wrote it
    except Exception as error:
        raise Failed(f"{work.address} sent something this process cannot read ({error})", kind="offload") from error
