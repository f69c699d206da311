"""The `offload` decorator for CPU-heavy functions, and the executors that run them."""

from __future__ import annotations

import contextvars
import functools
import inspect
import os
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

from gymsdk.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

MAX_WORKERS = 32
"""The default number of workers is the number of cores, up to this limit."""

MIN_IDLE_SECONDS = 10.0
"""Seconds in which even a process on a very busy machine gets some CPU time, unless it waits for something else."""

GIBIBYTE = 2**30


class Offloaded(Protocol[P, R_co]):
    """An offloaded function: awaitable when called, with the original function under `__wrapped__`."""

    @property
    def __wrapped__(self) -> Callable[P, R_co]:
        """The original function, for a call in this process."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R_co]:
        """Run the function on the current executor."""


@dataclass(frozen=True, eq=False)
class Work(Generic[P, R_co]):
    """An offloaded function and its limits per call.

    Attributes:
        function: The function.
        timeout: Seconds without any CPU time after which a call hangs.
        cpu: The limit of CPU time in seconds.
        memory: The limit of memory in bytes.
        preload: Modules that a worker imports before it is needed.
    """

    function: Callable[P, R_co]
    timeout: float
    cpu: float
    memory: int
    preload: Sequence[str]

    @property
    def module(self) -> str:
        """The name of the module that defines the function."""
        return self.function.__module__

    @property
    def address(self) -> str:
        """The function's name across processes, `module:qualname`."""
        return f"{self.module}:{self.function.__qualname__}"

    @property
    def importable(self) -> bool:
        """Whether another process can import the function; functions of a script or notebook are not importable."""
        return self.module != "__main__"

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that a worker should import before the first call."""
        return (*self.preload, self.module) if self.importable else tuple(self.preload)


DEFAULT_EXECUTOR = "local"
"""The executor of a process that chooses no other."""


class Executor(Protocol):
    """Runs offloaded functions.

    An entry of the group `gymsdk.executors` is a function without arguments that returns an executor.
    """

    @property
    def waiting(self) -> int:
        """The number of calls that wait for a worker."""

    async def run(self, work: Work[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Return the result of the function, within the limits of *work*."""


class InlineExecutor:
    """Runs functions in the calling thread without limits: for tests, debuggers, and inside workers."""

    waiting = 0

    async def run(self, work: Work[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Return the result of the function."""
        return work.function(*args, **kwargs)


_registered_work: dict[str, Work[..., object]] = {}
_context_executor: contextvars.ContextVar[Executor] = contextvars.ContextVar("gymsdk_executor")
_process_executor: dict[str, Executor] = {}


def offload(
    *misplaced: object,
    timeout: float = 10.0,
    cpu: float | None = None,
    memory: int = 2 * GIBIBYTE,
    preload: Sequence[str] = (),
) -> Callable[[Callable[P, R]], Offloaded[P, R]]:
    """Decorate a pure, module-level function so that it runs in a worker process.

    Args:
        *misplaced: Must be empty: write `@offload()` with parentheses.
        timeout: Seconds after which a call that has used no CPU time hangs, at least `MIN_IDLE_SECONDS`. Its worker is
            killed, and the call raises `WorkerLost`. How long a call takes is not limited otherwise, because that
            depends on what else the machine does. A function that waits for something needs a longer time.
        cpu: Seconds of CPU time that a call may use, with the processes that it starts; half of *timeout* by default.
            If it uses more, the call raises `BudgetSpent`.
        memory: Bytes that a call may allocate. If it allocates more, the call raises `BudgetSpent`.
        preload: Modules that the function imports, or a module of yours that warms them up. Workers are forked from a
            process that has imported them, so that a replacement is ready immediately.

    Returns:
        The decorator.

    Raises:
        ValueError: *cpu* or *timeout* is not positive.
        TypeError: The function is not a plain function at the top of a module.
    """
    if misplaced:
        raise TypeError("write `@offload()` with parentheses, and its limits by name, as in `@offload(cpu=5)`")
    cpu_seconds = timeout / 2 if cpu is None else cpu
    if not (cpu_seconds > 0 and timeout > 0):
        raise ValueError(f"cpu and timeout must be positive, in seconds, got cpu={cpu_seconds:g}, timeout={timeout:g}")

    def decorate(function: Callable[P, R]) -> Offloaded[P, R]:
        _check_offloadable(function)
        idle = max(timeout, MIN_IDLE_SECONDS)
        work = Work(function, timeout=idle, cpu=cpu_seconds, memory=memory, preload=tuple(preload))
        _registered_work[work.address] = work

        @functools.wraps(function)
        async def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return await get_executor().run(work, *args, **kwargs)

        return call

    return decorate


def list_work() -> Collection[Work[..., object]]:
    """Return all offloaded functions of the modules that this process has imported."""
    return tuple(_registered_work.values())


def find_work(address: str) -> Work[..., object]:
    """Return the offloaded function with this address; its module must have been imported."""
    return _registered_work[address]


def get_executor() -> Executor:
    """Return the executor chosen with `use_executor`, else the process's executor, created on the first call."""
    executor = _context_executor.get(None) or _process_executor.get("")
    # setdefault is atomic, so threads that arrive here together all get the same executor.
    return executor or _process_executor.setdefault("", create_local_executor())


def count_waiting_calls() -> int:
    """Return the number of calls that wait for a worker of this process's executor."""
    executor = _process_executor.get("")
    return executor.waiting if executor is not None else 0


def set_default_executor(executor: Executor) -> None:
    """Set the executor of this process."""
    _process_executor[""] = executor


@contextmanager
def use_executor(executor: Executor) -> Iterator[None]:
    """Run offloaded functions on *executor* inside the block."""
    token = _context_executor.set(executor)
    try:
        yield
    finally:
        _context_executor.reset(token)


def get_worker_count() -> int:
    """Return the maximum number of workers: `GYMSDK_WORKERS`, else one per core; 0 means to run inline."""
    value = os.environ.get("GYMSDK_WORKERS", "")
    if not value:
        return min(os.cpu_count() or 1, MAX_WORKERS)
    if not value.isdecimal():
        raise UsageError(f"GYMSDK_WORKERS is {value!r}; set it to a number of processes, or to 0 to run inline")
    return int(value)


def create_local_executor() -> Executor:
    """Return an executor with worker processes on this machine, or one without if `GYMSDK_WORKERS` is 0."""
    from gymsdk.workers.processes import ProcessExecutor

    count = get_worker_count()
    return ProcessExecutor(count) if count else InlineExecutor()


def _check_offloadable(function: Callable[..., object]) -> None:
    name = getattr(function, "__qualname__", None)
    if name is None or inspect.isclass(function):
        raise TypeError(f"{function!r} cannot be offloaded; write a `def` at the top of a module")
    if "." in name or "<" in name:
        raise TypeError(f"{name!r} cannot be offloaded: workers find only functions at the top of a module; move it")
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"{name!r} cannot be offloaded: it is `async`; write it as a plain `def`")
    if inspect.isgeneratorfunction(function):
        raise TypeError(f"{name!r} cannot be offloaded: it is a generator; return a list")
