"""Profiling: what a server's routes and hooks spend, told at `/stats`, and written to a folder at the end."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson

from gymsdk import spent
from gymsdk.errors import UsageError
from gymsdk.spent import Account, Ledger
from gymsdk.transcript import Item


@contextmanager
def profiled(directory: Path | None) -> Iterator[None]:
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
    ledger = spent.begin()
    try:
        yield
    finally:
        _dump(ledger, directory)
        spent.end()


def statistics(server: str) -> Item:
    """Give what the routes and hooks of *server* have spent, of what its process has; times are milliseconds of CPU."""
    ledger = spent.ledger()
    assert ledger is not None, "asked only where it is counted"
    return _told(ledger, server)


def _told(ledger: Ledger, server: str) -> Item:
    began, cpu = ledger.began
    routes = {route: _route(each) for (of, route), each in sorted(ledger.routes.items()) if of == server}
    hooks: dict[str, Item] = {}
    for (of, environment, what), each in sorted(ledger.hooks.items()):
        if of == server:
            hooks.setdefault(environment, {})[what.removeprefix("hook ").replace("'", "")] = _hook(each)
    return {
        "server": server,
        "pid": os.getpid(),
        "seconds": round(time.time() - began, 3),
        "process_cpu_ms": _ms(time.process_time() - cpu),
        "routes": routes,
        "hooks": hooks,
    }


def _route(account: Account) -> Item:
    return {"requests": account.calls, "cpu_ms": _ms(account.cpu_seconds)}


def _hook(account: Account) -> Item:
    return {"calls": account.calls, "cpu_ms": _ms(account.cpu_seconds), "workers_cpu_ms": _ms(account.worker_cpu_seconds)}


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def _dump(ledger: Ledger, directory: Path) -> None:
    # Several nodes may share the folder: a server's file says whose it is.
    for server in sorted({key[0] for key in (*ledger.routes, *ledger.hooks) if key[0]}):
        path = directory / f"{named(server)}.{os.getpid()}.json"
        path.write_bytes(orjson.dumps(_told(ledger, server), option=orjson.OPT_INDENT_2))


def named(server: str) -> str:
    """Give what the file of *server* is called."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", server)
