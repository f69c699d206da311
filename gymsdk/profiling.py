"""Profiling: what a server's routes and hooks spend, told at `/stats`, and written to a folder at the end."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import orjson

from gymsdk import context
from gymsdk.errors import UsageError
from gymsdk.types import Item

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class CpuCounter:
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


class CpuProfile:
    """The accounts of one process: *routes* by server and route, *hooks* by server, environment and hook."""

    def __init__(self) -> None:
        self.began = (time.time(), time.process_time())
        self.routes: dict[tuple[str, str], CpuCounter] = {}
        self.hooks: dict[tuple[str, str, str], CpuCounter] = {}

    def get_route_counter(self, server: str, route: str) -> CpuCounter:
        """Give the account of a route."""
        return self.routes.setdefault((server, route), CpuCounter())

    def get_hook_counter(self, environment: str, what: str) -> CpuCounter:
        """Give the account of a hook or tool, for the server that asks it."""
        here = context.get_log_context()
        return self.hooks.setdefault((here.server if here else "", environment, what), CpuCounter())


_profile: CpuProfile | None = None
_active_counter: ContextVar[CpuCounter | None] = ContextVar("gymsdk_account", default=None)


def get_cpu_profile() -> CpuProfile | None:
    """Give the ledger, `None` where nobody asks what is spent."""
    return _profile


def start_profiling() -> CpuProfile:
    """Count from now on, and give the ledger."""
    global _profile  # noqa: PLW0603  # one for the process, as CPU is
    _profile = CpuProfile()
    return _profile


def stop_profiling() -> None:
    """Count no more."""
    global _profile  # noqa: PLW0603  # one for the process, as CPU is
    _profile = None


@contextmanager
def count_call(environment: str, what: str) -> Generator[CpuCounter | None]:
    """Give the account that a call of a hook or tool goes to, which it is counted in; `None` where nobody asks."""
    if _profile is None:
        yield None
        return
    account = _profile.get_hook_counter(environment, what)
    account.calls += 1
    token = _active_counter.set(account)
    try:
        yield account
    finally:
        _active_counter.reset(token)


@contextmanager
def count_worker_cpu(process: int) -> Generator[None]:
    """Count the CPU that the worker *process* takes inside the block to the hook that asks it."""
    account = _active_counter.get()
    if account is None:
        yield
        return
    began = _read_process_cpu(process)
    try:
        yield
    finally:
        account.worker_cpu_seconds += max(0.0, _read_process_cpu(process) - began)


def _read_process_cpu(process: int) -> float:
    try:
        # The clock of another process, as clock_getcpuclockid(3) names it.
        return time.clock_gettime((~process << 3) | 2)
    except OSError:
        return 0.0


class ProfiledCoroutine(Coroutine[Any, Any, T]):
    """A *coroutine* whose CPU is counted step by step, while others have their turn in between.

    It goes to *account*, or else to whatever the request in hand does.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, T], account: CpuCounter | None = None) -> None:
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
        here = context.get_log_context()
        if here is None:
            return
        if here.cpu_counter is None:
            here.cpu_seconds += seconds
        else:
            here.cpu_counter.cpu_seconds += seconds


def profile_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Have every task that *loop* begins from now on counted."""
    loop.set_task_factory(_create_profiled_task)


def _create_profiled_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    return asyncio.Task(ProfiledCoroutine(coroutine), loop=loop, **options)


def assign_route(here: context.LogContext, route: str) -> None:
    """Put what the request of the trail *here* has spent on the account of its *route*, and what it still does."""
    if _profile is None:
        return
    here.cpu_counter = _profile.get_route_counter(here.server, route)
    here.cpu_counter.calls += 1
    here.cpu_counter.cpu_seconds += here.cpu_seconds
    here.cpu_seconds = 0.0


@contextmanager
def profile_to_directory(directory: Path | None) -> Iterator[None]:
    """Count what is spent while the context is open, and write it to a file of *directory* for each server then.

    Apps that are made inside tell of it at `/stats`. Without a directory nothing is counted. Raises `UsageError`.
    """
    if directory is None:
        yield
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--profile {directory}: no folder can be made there ({error.strerror or error})") from None
    ledger = start_profiling()
    try:
        yield
    finally:
        _write_statistics(ledger, directory)
        stop_profiling()


def get_statistics(server: str) -> Item:
    """Give what the routes and hooks of *server* have spent, of what its process has; times are milliseconds of CPU."""
    ledger = get_cpu_profile()
    assert ledger is not None, "asked only where it is counted"
    return _build_statistics(ledger, server)


def _build_statistics(ledger: CpuProfile, server: str) -> Item:
    began, cpu = ledger.began
    routes = {
        route: _build_route_statistics(each) for (of, route), each in sorted(ledger.routes.items()) if of == server
    }
    hooks: dict[str, Item] = {}
    for (of, environment, what), each in sorted(ledger.hooks.items()):
        if of == server:
            hooks.setdefault(environment, {})[what.removeprefix("hook ").replace("'", "")] = _build_hook_statistics(
                each
            )
    return {
        "server": server,
        "pid": os.getpid(),
        "seconds": round(time.time() - began, 3),
        "process_cpu_ms": _to_milliseconds(time.process_time() - cpu),
        "routes": routes,
        "hooks": hooks,
    }


def _build_route_statistics(account: CpuCounter) -> Item:
    return {"requests": account.calls, "cpu_ms": _to_milliseconds(account.cpu_seconds)}


def _build_hook_statistics(account: CpuCounter) -> Item:
    return {
        "calls": account.calls,
        "cpu_ms": _to_milliseconds(account.cpu_seconds),
        "workers_cpu_ms": _to_milliseconds(account.worker_cpu_seconds),
    }


def _to_milliseconds(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def _write_statistics(ledger: CpuProfile, directory: Path) -> None:
    # Several nodes may share the folder: a server's file says whose it is.
    for server in sorted({key[0] for key in (*ledger.routes, *ledger.hooks) if key[0]}):
        path = directory / f"{get_file_stem(server)}.{os.getpid()}.json"
        path.write_bytes(orjson.dumps(_build_statistics(ledger, server), option=orjson.OPT_INDENT_2))


def get_file_stem(server: str) -> str:
    """Give what the file of *server* is called."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", server)
