"""Offloaded functions: CPU-heavy pure functions that run elsewhere, and the executors that run them."""

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
GIBIBYTE = 2**30


class Offloaded(Protocol[P, R_co]):
    """What `offload` makes of a function: awaitable when called, the function itself under `__wrapped__`."""

    @property
    def __wrapped__(self) -> Callable[P, R_co]:
        """The function, to be run right here."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R_co]:
        """Run the function on this process's executor."""


@dataclass(frozen=True, eq=False)
class Work(Generic[P, R_co]):
    """A function that may run elsewhere, its budgets per call, and the modules to import before it is needed."""

    function: Callable[P, R_co]
    timeout: float
    cpu: float
    memory: int
    preload: Sequence[str]

    @property
    def module(self) -> str:
        """The name of the module the function was defined in."""
        return self.function.__module__

    @property
    def address(self) -> str:
        """`module:qualname`, the function's name across processes."""
        return f"{self.module}:{self.function.__qualname__}"

    @property
    def importable(self) -> bool:
        """Whether another process can import the function; what a script or notebook defines it cannot."""
        return self.module != "__main__"

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules a worker should have before the first call."""
        return (*self.preload, self.module) if self.importable else tuple(self.preload)


class Executor(Protocol):
    """Something that runs offloaded functions."""

    async def run(self, work: Work[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Give what the function returns, within the budgets of *work*."""


class InlineExecutor:
    """The executor that runs a function right here, without any budget: for tests, debuggers, and inside workers."""

    async def run(self, work: Work[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Give what the function returns."""
        return work.function(*args, **kwargs)


_registered_work: dict[str, Work[..., object]] = {}
_context_executor: contextvars.ContextVar[Executor] = contextvars.ContextVar("gymsdk_executor")
_process_executor: dict[str, Executor] = {}


def list_work() -> Collection[Work[..., object]]:
    """Every offloaded function this process has seen."""
    return tuple(_registered_work.values())


def find_work(address: str) -> Work[..., object]:
    """The offloaded function of that address, once its module is imported."""
    return _registered_work[address]


def get_executor() -> Executor:
    """The executor of this context: the one chosen with `use`, else the process's own, made at the first call."""
    chosen = _context_executor.get(None) or _process_executor.get("")
    # setdefault is atomic: of two threads that get here together, both take the same one.
    return chosen or _process_executor.setdefault("", _create_executor())


def set_default_executor(new: Executor) -> None:
    """Make *new* the executor of this process."""
    _process_executor[""] = new


@contextmanager
def use_executor(chosen: Executor) -> Iterator[None]:
    """Run offloaded calls of this context on *chosen*."""
    token = _context_executor.set(chosen)
    try:
        yield
    finally:
        _context_executor.reset(token)


def _create_executor() -> Executor:
    from gymsdk.workers.processes import ProcessExecutor

    count = get_worker_count()
    return ProcessExecutor(count) if count else InlineExecutor()


def get_worker_count() -> int:
    """How many workers this process may have: `GYMSDK_WORKERS`, else one per core; 0 means to run inline."""
    given = os.environ.get("GYMSDK_WORKERS", "")
    if not given:
        return min(os.cpu_count() or 1, MAX_WORKERS)
    if not given.isdecimal():
        raise UsageError(f"GYMSDK_WORKERS is {given!r}; set it to a number of processes, or to 0 to run inline")
    return int(given)


def offload(
    *misplaced: object,
    timeout: float = 10.0,
    cpu: float | None = None,
    memory: int = 2 * GIBIBYTE,
    preload: Sequence[str] = (),
) -> Callable[[Callable[P, R]], Offloaded[P, R]]:
    """Give the decorator of a module-level pure function that is too heavy for the event loop.

    A call may take *timeout* seconds once it runs, else its worker is killed and `WorkerLost` raised; it may use
    *cpu* seconds of processor time (half of *timeout* unless given) and *memory* bytes, else `BudgetSpent` is
    raised. *preload* names modules that the function imports (or one of your own that warms them up): workers are
    forked with these imported, so that one that replaces another is ready at once.
    """
    if misplaced:
        raise TypeError("write `@offload()` with its brackets, and its budgets by name, as in `@offload(timeout=5)`")
    budget = timeout / 2 if cpu is None else cpu
    if not 0 < budget < timeout:
        raise ValueError(f"cpu={budget:g} of timeout={timeout:g}: give seconds with 0 < cpu < timeout")

    def decorate(function: Callable[P, R]) -> Offloaded[P, R]:
        _check_offloadable(function)
        work = Work(function, timeout=timeout, cpu=budget, memory=memory, preload=tuple(preload))
        _registered_work[work.address] = work

        @functools.wraps(function)
        async def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return await get_executor().run(work, *args, **kwargs)

        return call

    return decorate


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
