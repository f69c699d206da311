"""What is spent: CPU time by route and by hook, counted while somebody asks for it and not otherwise."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from gymsdk import trail

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Account:
    """How often something was asked, and the seconds of CPU it took: here, and in worker processes."""

    calls: int = 0
    cpu_seconds: float = 0.0
    worker_cpu_seconds: float = 0.0

    def measure(self, function: Callable[[], T]) -> Callable[[], T]:
        """Give *function*, to be run in a thread, its CPU counted here."""

        def run() -> T:
            began = time.thread_time()
            try:
                return function()
            finally:
                self.cpu_seconds += time.thread_time() - began

        return run


class Ledger:
    """The accounts of one process: *routes* by server and route, *hooks* by server, environment and hook."""

    def __init__(self) -> None:
        self.began = (time.time(), time.process_time())
        self.routes: dict[tuple[str, str], Account] = {}
        self.hooks: dict[tuple[str, str, str], Account] = {}

    def get_route_counter(self, server: str, route: str) -> Account:
        """Give the account of a route."""
        return self.routes.setdefault((server, route), Account())

    def get_hook_counter(self, environment: str, what: str) -> Account:
        """Give the account of a hook or tool, for the server that asks it."""
        here = trail.current()
        return self.hooks.setdefault((here.server if here else "", environment, what), Account())


_ledger: Ledger | None = None
_asking: ContextVar[Account | None] = ContextVar("gymsdk_account", default=None)


def ledger() -> Ledger | None:
    """Give the ledger, `None` where nobody asks what is spent."""
    return _ledger


def begin() -> Ledger:
    """Count from now on, and give the ledger."""
    global _ledger  # noqa: PLW0603  # one for the process, as CPU is
    _ledger = Ledger()
    return _ledger


def end() -> None:
    """Count no more."""
    global _ledger  # noqa: PLW0603  # one for the process, as CPU is
    _ledger = None


@contextmanager
def asked(environment: str, what: str) -> Generator[Account | None]:
    """Give the account that a call of a hook or tool goes to, which it is counted in; `None` where nobody asks."""
    if _ledger is None:
        yield None
        return
    account = _ledger.get_hook_counter(environment, what)
    account.calls += 1
    token = _asking.set(account)
    try:
        yield account
    finally:
        _asking.reset(token)


@contextmanager
def of_worker(process: int) -> Generator[None]:
    """Count the CPU that the worker *process* takes inside the block to the hook that asks it."""
    account = _asking.get()
    if account is None:
        yield
        return
    began = _cpu(process)
    try:
        yield
    finally:
        account.worker_cpu_seconds += max(0.0, _cpu(process) - began)


def _cpu(process: int) -> float:
    try:
        # The clock of another process, as clock_getcpuclockid(3) names it.
        return time.clock_gettime((~process << 3) | 2)
    except OSError:
        return 0.0


class Stepped(Coroutine[Any, Any, T]):
    """A *coroutine* whose CPU is counted step by step, while others have their turn in between.

    It goes to *account*, or else to whatever the request in hand does.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, T], account: Account | None = None) -> None:
        self._coroutine = coroutine
        self._account = account

    def send(self, value: Any) -> Any:
        """Go on until it waits for something again."""
        began = time.thread_time()
        try:
            return self._coroutine.send(value)
        finally:
            self._count(time.thread_time() - began)

    def throw(self, *error: Any) -> Any:
        """Go on with an error."""
        began = time.thread_time()
        try:
            return self._coroutine.throw(*error)
        finally:
            self._count(time.thread_time() - began)

    def close(self) -> None:
        """End it."""
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, T]:
        return self._coroutine.__await__()

    def _count(self, seconds: float) -> None:
        if self._account is not None:
            self._account.cpu_seconds += seconds
            return
        here = trail.current()
        if here is None:
            return
        if here.cpu_counter is None:
            here.cpu_seconds += seconds
        else:
            here.cpu_counter.cpu_seconds += seconds


def watch(loop: asyncio.AbstractEventLoop) -> None:
    """Have every task that *loop* begins from now on counted."""
    loop.set_task_factory(_task)


def _task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    return asyncio.Task(Stepped(coroutine), loop=loop, **options)


def settle(here: trail.Trail, route: str) -> None:
    """Put what the request of the trail *here* has spent on the account of its *route*, and what it still does."""
    if _ledger is None:
        return
    here.cpu_counter = _ledger.get_route_counter(here.server, route)
    here.cpu_counter.calls += 1
    here.cpu_counter.cpu_seconds += here.cpu_seconds
    here.cpu_seconds = 0.0
