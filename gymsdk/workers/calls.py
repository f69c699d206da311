"""One call inside a worker: its function found, its budgets kept, its end made fit to travel."""

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
"""How it ended, and the rest of it, pickled."""

MAX_TRACEBACK_CHARS = 4000
LENGTH_PREFIX_BYTES = 8

_loaded_functions: dict[str, Callable[..., object]] = {}


def run_worker(line: socket.socket) -> None:
    """Be a worker: answer the requests that come over *line*, one at a time, until the host closes it."""
    # Default actions end the process even in the middle of C code, where a Python handler would have to wait.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    threading.Thread(target=_exit_with_host, args=(line,), daemon=True).start()
    sys.stdout = sys.stderr  # what a function prints must not mix with what the host prints for programs
    set_default_executor(InlineExecutor())
    with line.makefile("rb") as requests:
        while size := int.from_bytes(requests.read(LENGTH_PREFIX_BYTES), "big"):
            function, arguments = pickle.loads(requests.read(size))  # noqa: S301 - the host wrote it
            line.sendall(frame_message(pickle.dumps(function(*arguments))))


def _exit_with_host(line: socket.socket) -> None:
    end = select.poll()
    end.register(line, select.POLLRDHUP)
    end.poll()
    os._exit(1)


def frame_message(message: bytes) -> bytes:
    """Give *message* with its size before it."""
    return len(message).to_bytes(LENGTH_PREFIX_BYTES, "big") + message


def pickle_by_value(content: object) -> bytes:
    """Give *content* as bytes for another process, what `__main__` defines by value."""
    data: bytes = cloudpickle.dumps(content)
    return data


def load_function(address: str, code: bytes | None, path: list[str]) -> CallResult:
    """Find the function of that address by way of *path*, or make it from *code*, and keep it for `execute`."""
    try:
        if sys.path != path:
            # What a notebook adds once it has called something is for what it calls from then on.
            sys.path[:] = path
            importlib.invalidate_caches()
        if code is None:
            importlib.import_module(address.partition(":")[0])
        _loaded_functions[address] = find_work(address).function if code is None else pickle.loads(code)  # noqa: S301 - the host wrote it
    except BaseException as error:  # noqa: BLE001 - the host raises it
        return _pack_error(error)
    return "ready", b""


def execute_call(address: str, arguments: bytes, cpu: float, memory: int) -> CallResult:
    """Call the function with *arguments* on these budgets, and give how it ended."""
    try:
        with _limit_resources(cpu, memory):
            args, kwargs = pickle.loads(arguments)  # noqa: S301 - the host wrote them
            return _pack_value(_loaded_functions[address](*args, **kwargs))
    except MemoryError:
        return "memory", b""
    except BaseException as error:  # noqa: BLE001 - the host raises it
        return _pack_error(error)


@contextlib.contextmanager
def _limit_resources(cpu: float, memory: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    finite = [limit for limit in (_get_data_bytes() + memory, soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(finite), hard))
    # When it is spent the kernel ends the process, whatever code it is in; the host sees that by the exit status.
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
    except Exception as error:  # noqa: BLE001 - whatever the value's own pickling raises
        return _pack_failure(
            f"returned a {type(value).__name__}, which cannot be sent back ({error}); return plain data"
        )


def _pack_error(error: BaseException) -> CallResult:
    text = "".join(traceback.format_exception(error))[-MAX_TRACEBACK_CHARS:]
    if not isinstance(error, Exception):
        return _pack_failure(f"ended with {type(error).__name__}:\n{text}")
    for form in (error, _PortableError(error)):
        if body := _pickle_if_readable((form, text)):
            return "error", body
    return _pack_failure(f"raised an exception that cannot be sent back:\n{text}")


def _pack_failure(said: str) -> CallResult:
    return "lost", pickle.dumps(said)


def _pickle_if_readable(content: object) -> bytes | None:
    try:
        body = pickle_by_value(content)
        pickle.loads(body)  # noqa: S301 - written on the line above
    except Exception:  # noqa: BLE001 - whatever an exception's own pickling raises
        return None
    return body


@dataclass(frozen=True)
class _PortableError:
    """An exception that travels without its `__init__`, whose parameters its `args` need not match."""

    error: Exception

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_error, (type(self.error), self.error.args, self.error.__dict__)


def _rebuild_error(kind: type[Exception], args: tuple[object, ...], state: dict[str, object]) -> Exception:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error
