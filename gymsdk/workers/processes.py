"""Local worker processes: warm processes that run offloaded calls one at a time, and are replaced when lost.

Workers are forked from a *fork server*: a fresh interpreter that has imported the modules that workers need. It never
runs the host's `__main__`, so scripts need no `if __name__ == "__main__"` guard.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import importlib
import os
import pickle
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn, ParamSpec, TypeAlias, TypeVar

import cloudpickle  # type: ignore[import-untyped]  # it has no annotations

from gymsdk.concurrency import CrossLoopSemaphore, ThreadPool
from gymsdk.errors import BudgetSpent, Failed, WorkerLost, rebuild_error
from gymsdk.interpreter import build_code_command
from gymsdk.plugins.calls import pause_deadline
from gymsdk.workers.cpu_watch import (
    CHECK_SECONDS,
    CpuWatch,
    compute_longest_seconds,
    count_worker_cpu,
    limit_cpu,
    read_own_cpu_seconds,
    read_tree_cpu_seconds,
)
from gymsdk.workers.offload import InlineExecutor, Work, find_work, list_work, set_default_executor
from gymsdk.working_folder import find_working_folder

CallResult: TypeAlias = tuple[Literal["ready", "value", "error", "memory", "lost"], bytes]
"""How a request to a worker ended, and its pickled content."""


@dataclass(frozen=True, slots=True)
class PickledCall:
    """A call of an offloaded function, for another process.

    Attributes:
        address: The function's address, `module:qualname`.
        code: The pickled function, if it cannot be imported.
        arguments: The pickled positional and keyword arguments.
        timeout: Seconds without any CPU time after which the call hangs.
        cpu: The limit of CPU time in seconds.
        memory: The limit of additional memory in bytes.
        modules: Modules that the worker should import before the first call.
    """

    address: str
    code: bytes | None
    arguments: bytes
    timeout: float
    cpu: float
    memory: int
    modules: tuple[str, ...]

    @property
    def longest_seconds(self) -> float:
        """The longest time that the call takes once it runs, on the busiest machine."""
        return compute_longest_seconds(self.cpu, self.timeout)


MAX_TRACEBACK_CHARS = 4000

LENGTH_PREFIX_BYTES = 8
"""The size of the length prefix of each message between the host and a worker."""

_loaded_functions: dict[str, Callable[..., object]] = {}


def run_worker(connection: socket.socket) -> None:
    """Run a worker process: serve the requests on *connection*, one at a time, until the host closes it."""
    # The default action ends the process even inside C code, where a Python signal handler would have to wait.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    threading.Thread(target=_exit_with_host, args=(connection,), daemon=True).start()
    sys.stdout = sys.stderr  # the host's standard output may be read by programs
    set_default_executor(InlineExecutor())
    with connection.makefile("rb") as requests:
        while size := int.from_bytes(requests.read(LENGTH_PREFIX_BYTES), "big"):
            function, arguments = pickle.loads(requests.read(size))  # noqa: S301 - written by the host
            connection.sendall(frame_message(pickle.dumps(function(*arguments))))


def frame_message(message: bytes) -> bytes:
    """Return *message* with a length prefix."""
    return len(message).to_bytes(LENGTH_PREFIX_BYTES, "big") + message


def pickle_by_value(content: object) -> bytes:
    """Pickle *content* for another process, with definitions of `__main__` included."""
    data: bytes = cloudpickle.dumps(content)
    return data


def load_function(address: str, code: bytes | None, path: list[str]) -> CallResult:
    """Load the function of a later `execute_call`.

    Args:
        address: The function's address, `module:qualname`.
        code: The pickled function, if it cannot be imported.
        path: The module search path of the host.
    """
    try:
        if sys.path != path:
            # A notebook may extend the path between two calls.
            sys.path[:] = path
            importlib.invalidate_caches()
        if code is None:
            importlib.import_module(address.partition(":")[0])
            _loaded_functions[address] = find_work(address).function
        else:
            _loaded_functions[address] = pickle.loads(code)  # noqa: S301 - written by the host
    except BaseException as error:  # noqa: BLE001 - the host raises it
        return _pack_error(error)
    return "ready", b""


def execute_call(address: str, arguments: bytes, cpu: float, memory: int) -> CallResult:
    """Call a loaded function.

    Args:
        address: The function's address.
        arguments: The pickled positional and keyword arguments.
        cpu: The limit of CPU time in seconds.
        memory: The limit of additional memory in bytes.
    """
    try:
        with _limit_resources(cpu, memory):
            args, kwargs = pickle.loads(arguments)  # noqa: S301 - written by the host
            return _pack_value(_loaded_functions[address](*args, **kwargs))
    except MemoryError:
        return "memory", b""
    except BaseException as error:  # noqa: BLE001 - the host raises it
        return _pack_error(error)


def _exit_with_host(connection: socket.socket) -> None:
    hangup = select.poll()
    hangup.register(connection, select.POLLRDHUP)
    hangup.poll()
    os._exit(1)


@contextlib.contextmanager
def _limit_resources(cpu: float, memory: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    used = int(Path("/proc/self/statm").read_bytes().split()[5]) * resource.getpagesize()
    limits = [limit for limit in (used + memory, soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))
    # When the timer expires, the kernel ends the process in any code; the host sees the signal in the exit status.
    signal.setitimer(signal.ITIMER_PROF, cpu)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _pack_value(value: object) -> CallResult:
    try:
        return "value", pickle_by_value(value)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - pickling may call any code of the value
        return _pack_failure(f"returned a {type(value).__name__}, which cannot be pickled ({error}); return plain data")


def _pack_error(error: BaseException) -> CallResult:
    text = "".join(traceback.format_exception(error))[-MAX_TRACEBACK_CHARS:]
    if not isinstance(error, Exception):
        return _pack_failure(f"ended with {type(error).__name__}:\n{text}")
    for form in (error, _PortableError(error)):
        if body := _pickle_if_readable((form, text)):
            return "error", body
    return _pack_failure(f"raised an exception that cannot be pickled:\n{text}")


def _pack_failure(message: str) -> CallResult:
    return "lost", pickle.dumps(message)


def _pickle_if_readable(content: object) -> bytes | None:
    try:
        body = pickle_by_value(content)
        pickle.loads(body)  # noqa: S301 - written on the line above
    except Exception:  # noqa: BLE001 - pickling may call any code of an exception
        return None
    return body


@dataclass(frozen=True)
class _PortableError:
    """Pickles an exception without a call of its `__init__`, whose parameters may differ from its `args`."""

    error: Exception

    def __reduce__(self) -> tuple[object, ...]:
        return rebuild_error, (type(self.error), self.error.args, self.error.__dict__)


P = ParamSpec("P")
R = TypeVar("R")

START_SECONDS = 60.0
"""Seconds of CPU time that a worker may take to load a function, or the fork server to import modules and to fork.

A process that uses no CPU time for as long hangs.
"""

MAX_START_ATTEMPTS = 3
"""The number of workers that are tried for a call if they are lost before it begins."""

MAX_READ_BYTES = 2**20
"""The size of one read from a worker."""

MAX_MESSAGE_BYTES = 2**18
"""The size of a message to or from the fork server."""


# The executor


class ProcessExecutor:
    """Runs offloaded functions in worker processes.

    Args:
        count: The maximum number of workers. A worker is started by the first call that finds none idle.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._initialize()

    def _initialize(self) -> None:
        self._process = os.getpid()
        self._semaphore = CrossLoopSemaphore(self._count)
        self._fork_server = ForkServer()
        starters = ThreadPool(self._count)
        self._slots = [WorkerSlot(self._fork_server, starters) for _ in range(self._count)]
        self._free = list(self._slots)
        atexit.register(self.close)

    def _initialize_after_fork(self) -> None:
        for slot in self._slots:
            slot.disconnect()
        self._fork_server.abandon()
        self._initialize()

    async def run(self, work: Work[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function in a worker and return its result."""
        if self._process != os.getpid():
            self._initialize_after_fork()
        call = pickle_call(work, args, kwargs)
        with pause_deadline():
            result = await self.run_call(call)
        value: R = unpack_result(result, call)
        return value

    async def run_call(self, call: PickledCall) -> CallResult:
        """Run a pickled call in a worker and return its pickled result.

        Raises:
            BudgetSpent: The call used up its CPU time.
            WorkerLost: The worker was lost, or the call hangs.
        """
        semaphore, free = self._semaphore, self._free
        await semaphore.acquire()
        slot = free.pop()
        try:
            result = await slot.run(call)
            if result[0] == "memory":
                slot.discard()  # its heap may be nearly full
            return result
        finally:
            # Slots are taken from the end, so idle workers are used before new ones are started.
            free.insert(0 if slot.is_empty else len(free), slot)
            semaphore.release()

    @property
    def waiting(self) -> int:
        """The number of calls that wait for a worker."""
        return self._semaphore.waiting

    def close(self) -> None:
        """End the workers; a later call starts new ones."""
        if self._process == os.getpid():
            self._fork_server.close([slot.disconnect() for slot in self._slots])


class _WorkerNotReadyError(Exception):
    """The worker was lost before the call began, so another worker may run it."""


class WorkerSlot:
    """The place of one worker: empty until a call needs a worker, and after the worker was lost."""

    def __init__(self, fork_server: ForkServer, starters: ThreadPool) -> None:
        self._fork_server = fork_server
        self._starters = starters
        self._connection: socket.socket | None = None
        self._process = 0
        self._loaded: dict[str, bytes | None] = {}
        self._path: list[str] = []

    @property
    def is_empty(self) -> bool:
        """Whether the next call has to start a worker."""
        return self._connection is None

    async def run(self, call: PickledCall) -> CallResult:
        """Run one call and return its result; without a result, the worker is discarded."""
        reason = ""
        for _ in range(MAX_START_ATTEMPTS):
            try:
                return await self._load(call) or await self._execute(call)
            except _WorkerNotReadyError as error:
                reason = str(error)
                self.discard()
            except BaseException:
                self.discard()
                raise
        raise WorkerLost(f"no worker could run {call.address}: {reason}", kind="worker_start", retryable=True)

    def discard(self) -> None:
        """Disconnect from the worker and kill it in the background."""
        process = self.disconnect()
        if process:
            threading.Thread(target=self._fork_server.kill, args=(process,), name="gymsdk-end", daemon=True).start()

    def disconnect(self) -> int:
        """Close the connection to the worker and return its process id, 0 if there is none."""
        if self._connection is not None:
            self._connection.close()
        process, self._process = self._process, 0
        self._connection, self._loaded = None, {}
        return process

    async def _load(self, call: PickledCall) -> CallResult | None:
        """Make the worker load the function, and return the result if that failed."""
        address, code = call.address, call.code
        if address in self._loaded and self._loaded[address] == code and self._path == sys.path:
            return None
        path = [*sys.path]
        try:
            connection = self._connection or await self._start(call.modules)
            watch = CpuWatch(partial(read_own_cpu_seconds, self._process), cpu=START_SECONDS, idle=START_SECONDS)
            async with limit_cpu(watch):
                result = await _call_worker(connection, load_function, address, code, path)
        except (OSError, EOFError) as error:  # TimeoutError is an OSError
            raise _WorkerNotReadyError(f"it did not start ({error!r})") from error
        if result[0] != "ready":
            return result
        self._loaded[address], self._path = code, path
        return None

    async def _start(self, needed: Collection[str]) -> socket.socket:
        self._connection, worker_end = socket.socketpair()
        self._connection.setblocking(False)
        modules = sorted({*needed, *(module for work in list_work() for module in work.modules)})
        self._process = await self._starters.run(self._fork_server.fork, worker_end, modules)
        return self._connection

    async def _execute(self, call: PickledCall) -> CallResult:
        assert self._connection is not None
        # The worker itself ends when it has used up its CPU time; the watch finds what its children use.
        watch = CpuWatch(partial(read_tree_cpu_seconds, self._process), cpu=call.cpu, idle=call.timeout)
        try:
            async with limit_cpu(watch):
                with count_worker_cpu(self._process):
                    return await _call_worker(
                        self._connection, execute_call, call.address, call.arguments, call.cpu, call.memory
                    )
        except TimeoutError:
            if watch.excess == "cpu":
                raise _build_spent_error(call) from None
            message = f"{call.address} hangs: {watch.describe_hang()}"
            raise WorkerLost(message, kind="worker_timeout", retryable=True) from None
        except ConnectionError as error:  # the worker has not read the request
            raise _WorkerNotReadyError("it was killed while idle") from error
        except EOFError:
            await self._raise_exit_reason(call)

    async def _raise_exit_reason(self, call: PickledCall) -> NoReturn:
        process, self._process = self._process, 0
        status = await self._starters.run(self._fork_server.kill, process)
        if status == -signal.SIGPROF:
            raise _build_spent_error(call)
        raise WorkerLost(
            f"the worker that ran {call.address} was killed or exited (status {status})",
            kind="worker_killed",
            retryable=True,
        )


def _build_spent_error(call: PickledCall) -> BudgetSpent:
    return BudgetSpent(f"{call.address} used up its {call.cpu:g} s of CPU time", kind="cpu_spent")


async def _call_worker(connection: socket.socket, *request: object) -> CallResult:
    function, *arguments = request
    await asyncio.get_running_loop().sock_sendall(connection, frame_message(pickle.dumps((function, arguments))))
    size = int.from_bytes(await _receive_exactly(connection, LENGTH_PREFIX_BYTES), "big")
    result: CallResult = pickle.loads(await _receive_exactly(connection, size))  # noqa: S301 - written by our worker
    return result


async def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = bytearray()
    while len(data) < size:
        part = await loop.sock_recv(connection, min(size - len(data), MAX_READ_BYTES))
        if not part:
            raise EOFError("the worker has exited")
        data += part
    return bytes(data)


def pickle_call(work: Work[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> PickledCall:
    """Return the call of *work* with these arguments, for another process.

    Raises:
        Failed: The function or an argument cannot be pickled.
    """
    return PickledCall(
        work.address,
        None if work.importable else _pickle_for_worker(work.function, work.address),
        _pickle_for_worker((args, kwargs), work.address),
        work.timeout,
        work.cpu,
        work.memory,
        work.modules,
    )


def _pickle_for_worker(content: object, address: str) -> bytes:
    try:
        return pickle_by_value(content)
    except Exception as error:
        message = f"{address} uses an object that cannot be sent to a worker ({error}); pass plain data"
        raise Failed(message, kind="offload") from error


def unpack_result(result: CallResult, call: PickledCall) -> Any:
    """Return the value of a *call*, or raise the exception with which it ended.

    Raises:
        BudgetSpent: The call used up its memory.
        Failed: The result cannot be unpickled.
    """
    kind, body = result
    if kind == "memory":
        raise BudgetSpent(f"{call.address} used up its {call.memory >> 20} MiB of memory", kind="memory_spent")
    if kind == "value":
        return _unpickle_from_worker(body, call)
    if kind == "error":
        error, text = _unpickle_from_worker(body, call)
        if text:
            error.add_note(f"In the worker:\n{text}")
        raise error
    raise Failed(f"{call.address} {_unpickle_from_worker(body, call)}", kind="offload")


def _unpickle_from_worker(body: bytes, call: PickledCall) -> Any:
    try:
        return pickle.loads(body)  # noqa: S301 - written by our worker
    except Exception as error:
        raise Failed(
            f"the result of {call.address} cannot be read in this process ({error})", kind="offload"
        ) from error


# The fork server


@dataclass(frozen=True)
class _ForkRequest:
    """A request to fork a worker, after importing *modules* with this search *path* in this *folder*."""

    modules: tuple[str, ...]
    path: tuple[str, ...]
    folder: str


@dataclass(frozen=True)
class _KillRequest:
    """A request to kill a worker."""

    process: int


class ForkServer:
    """The host's connection to the fork server, which starts at the first fork, and again if it was lost."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._skip_preload = False

    def fork(self, connection: socket.socket, modules: Collection[str]) -> int:
        """Fork a worker.

        Args:
            connection: The worker's end of its connection, which is closed in this process.
            modules: Modules that the worker needs.

        Returns:
            The process id of the worker.

        Raises:
            OSError: The fork server did not answer.
        """
        with connection, self._lock:
            preload = () if self._skip_preload else tuple(modules)
            request = _ForkRequest(preload, tuple(sys.path), str(find_working_folder() or os.sep))
            control = self._control or self._start()
            try:
                return self._request(control, request, connection)
            except OSError as error:
                self._stop()
                # The server exited or hung, perhaps because of an import. From now on workers import for themselves.
                self._skip_preload = self._skip_preload or not isinstance(error, BrokenPipeError)
                raise

    def kill(self, process: int) -> int:
        """Kill a worker and return its exit status, 0 if unknown."""
        with self._lock:
            if self._control is None:
                return 0
            try:
                return self._request(self._control, _KillRequest(process))
            except OSError:
                self._stop()
                return 0

    def close(self, workers: Collection[int]) -> None:
        """End the fork server and these *workers*, even while a request is in progress."""
        if self._server is None or self._server.poll() is not None:
            return
        for worker in filter(None, workers):
            os.kill(worker, signal.SIGKILL)  # the fork server has not reaped it, so the process id is still valid
        self._stop()

    def abandon(self) -> None:
        """Disconnect from the fork server in a forked copy of the host, which is not its parent."""
        if self._control is not None and self._server is not None:
            self._control.close()
            self._server.returncode = 0

    def _start(self) -> socket.socket:
        host_end, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        host_end.settimeout(CHECK_SECONDS)
        code = f"from {__name__} import run_fork_server; run_fork_server({server_end.fileno()})"
        with server_end:
            self._server = subprocess.Popen(  # noqa: S603 - this interpreter
                build_code_command(code), pass_fds=[server_end.fileno()], stdin=subprocess.DEVNULL
            )
        self._control = host_end
        return host_end

    def _request(
        self, control: socket.socket, request: _ForkRequest | _KillRequest, *connections: socket.socket
    ) -> int:
        assert self._server is not None, "the fork server has a connection"
        watch = CpuWatch(partial(read_own_cpu_seconds, self._server.pid), cpu=START_SECONDS, idle=START_SECONDS)
        socket.send_fds(control, [pickle.dumps(request)], [connection.fileno() for connection in connections])
        while True:
            try:
                answer = control.recv(MAX_MESSAGE_BYTES)
            except TimeoutError:
                if watch.check():
                    raise
                continue
            if not answer:
                raise ConnectionError("the process that starts workers has exited")
            return int(answer)

    def _stop(self) -> None:
        control, self._control = self._control, None
        server, self._server = self._server, None
        if control is not None:
            control.close()
        if server is not None:
            server.kill()
            server.wait()


def run_fork_server(descriptor: int) -> None:
    """Run the fork server: serve the requests on the socket *descriptor* until the host exits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Preloaded libraries may keep threads. Python warns of a fork beside them; these libraries handle forks.
    warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*fork")
    control = socket.socket(fileno=descriptor)
    tried: set[str] = set()
    workers: set[int] = set()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, MAX_MESSAGE_BYTES, 1)
        if not message:
            return
        request = pickle.loads(message)  # noqa: S301 - written by the host
        if isinstance(request, _ForkRequest):
            _preload_modules(request, tried)
            # The workers' garbage collector must not traverse the objects of the preloaded modules again and again.
            gc.freeze()
            answer = _fork_worker(control, descriptors[0])
            workers.add(answer)
        else:
            # A worker of an earlier fork server is not a child of this one, so its process id may have been reused.
            answer = _kill_worker(request.process) if request.process in workers else 0
            workers.discard(request.process)
        control.send(str(answer).encode())


def _preload_modules(request: _ForkRequest, tried: set[str]) -> None:
    sys.path[:] = request.path
    # The folder may have been removed since the host started; functions rarely need it.
    with contextlib.suppress(FileNotFoundError):
        os.chdir(request.folder)
    for module in request.modules:
        if module not in tried:
            tried.add(module)
            # The worker that needs the module imports it again and reports the error.
            with contextlib.suppress(Exception, SystemExit):
                importlib.import_module(module)


def _fork_worker(control: socket.socket, descriptor: int) -> int:
    process = os.fork()
    if process == 0:
        control.close()
        _run_worker(descriptor)
    os.close(descriptor)
    return process


def _run_worker(descriptor: int) -> NoReturn:
    try:
        run_worker(socket.socket(fileno=descriptor))
    except ConnectionError:  # the host has exited
        os._exit(1)
    except BaseException:  # noqa: BLE001 - there is no caller to handle it
        traceback.print_exc()
    finally:
        os._exit(1)


def _kill_worker(worker: int) -> int:
    os.kill(worker, signal.SIGKILL)
    _, status = os.waitpid(worker, 0)
    return os.waitstatus_to_exitcode(status)
