"""The worker's side of an offloaded call: load the function, limit its resources, and pickle its outcome."""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import resource
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import cloudpickle  # type: ignore[import-untyped]  # it has no annotations

from gymsdk.workers.offload import InlineExecutor, find_work, set_default_executor

CallResult: TypeAlias = tuple[Literal["ready", "value", "error", "memory", "lost"], bytes]
"""How a request to a worker ended, and its pickled content."""

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
    limits = [limit for limit in (_get_data_bytes() + memory, soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))
    # When the timer expires, the kernel ends the process in any code; the host sees the signal in the exit status.
    signal.setitimer(signal.ITIMER_PROF, cpu)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _get_data_bytes() -> int:
    return int(Path("/proc/self/statm").read_bytes().split()[5]) * resource.getpagesize()


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
        return _rebuild_error, (type(self.error), self.error.args, self.error.__dict__)


def _rebuild_error(kind: type[Exception], args: tuple[object, ...], state: dict[str, object]) -> Exception:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error
