"""A run of checks: each looks at the subject under a bound of time, and what came of it is a result."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import Thread
from traceback import walk_tb
from typing import Any, TypeVar

from gymsdk.checks.check import Check, Finding, NotApplicable, Report, Result
from gymsdk.checks.loading import LOAD
from gymsdk.checks.subject import Subject
from gymsdk.complaints import raised
from gymsdk.errors import BadConfig, EpisodeError, GymsdkError, UnknownSplit
from gymsdk.workers.threads import Threads

GRACE = 5.0
"""Seconds a check has beyond its own to notice that it is over."""

MOST = 5
"""Warnings of one check that are kept."""

SLOW = "look at fewer tasks with --limit; where that does not help, find the hook or tool that takes so long"

T = TypeVar("T")


class Run:
    """The checks of one *subject*, one after another.

    Where it does not load, the check that came upon that fails, and those that would need it are skipped. Each runs
    in a thread, on an event loop of its own: code that holds the loop holds up no more than that check.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._threads = Threads()
        self._held: str | None = None

    async def outcome(self, check: Check) -> Result:
        """Give what came of *check*."""
        if self._threads.hung:
            return _skipped(check, "an earlier check has never come back; mend what that one found first")
        if check.loads and check.id != LOAD.id and self._held is None:
            loaded = await self._looked(LOAD)
            if loaded.status == "failed":
                return _of(check, loaded.findings, since=time.perf_counter())
        if check.loads and self._held:
            return _skipped(check, self._held)
        return await self._looked(check)

    async def each(self, checks: Iterable[Check]) -> AsyncIterator[Result]:
        """Yield what came of each of *checks* as it ends."""
        for check in checks:
            yield await self.outcome(check)

    async def report(self, checks: Iterable[Check]) -> Report:
        """Give what came of all *checks*."""
        return report(self.subject, [result async for result in self.each(checks)])

    async def _looked(self, check: Check) -> Result:
        look = partial(asyncio.run, outcome(check, self.subject))
        try:
            result = await self._threads.run(look, timeout=check.seconds + GRACE)
        except TimeoutError:
            seen = f"after {check.seconds:g} seconds it was not over and could not be stopped"
            mend = "find the `async def` hook or tool that never awaits, and make it a plain `def`"
            result = _of(check, [Finding(seen=seen, mend=mend)], since=time.perf_counter() - check.seconds)
        if check.id == LOAD.id:
            self._held = "it does not load" if result.status == "failed" else ""
        return result


def report(subject: Subject, results: list[Result]) -> Report:
    """Give *results* as a report on *subject*."""
    version = subject.entry.version if subject.entry else ""
    return Report(environment=subject.name, version=version, seed=subject.seed, results=results)


async def outcome(check: Check, subject: Subject) -> Result:
    """Give what came of *check* alone.

    Raises `UsageError` where the caller's own setting or split is wrong, and whatever is a bug of the check itself.
    """
    started = time.perf_counter()
    with _warnings() as told:
        try:
            async with asyncio.timeout(check.seconds):
                findings = await check.look(subject)
        except NotApplicable as error:
            return _skipped(check, str(error))
        except TimeoutError:
            findings = [Finding(seen=f"it was not over after {check.seconds:g} seconds", mend=SLOW)]
        except Exception as error:  # noqa: BLE001  # told apart there, and raised again where it is ours
            findings = [_finding(error, subject)]
    return _of(check, findings, since=started, warnings=told)


def waited_for(work: Coroutine[Any, Any, T]) -> T:
    """Give what *work* returns, wherever this is called: it has a thread and an event loop of its own."""
    ended: list[T] = []
    errors: list[BaseException] = []

    def go() -> None:
        try:
            ended.append(asyncio.run(work))
        except BaseException as error:  # noqa: BLE001  # it is raised again where the caller waits
            errors.append(error)

    thread = Thread(target=go, name="gymsdk-check", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return ended[0]


def _of(check: Check, findings: list[Finding], *, since: float, warnings: Iterable[str] = ()) -> Result:
    return Result(
        id=check.id,
        asks=check.asks,
        status="failed" if findings else "passed",
        why=check.why,
        mend=check.mend,
        findings=findings,
        warnings=list(warnings),
        seconds=round(time.perf_counter() - since, 3),
    )


def _skipped(check: Check, reason: str) -> Result:
    return Result(id=check.id, asks=check.asks, status="skipped", why=check.why, mend=check.mend, reason=reason)


def _finding(error: Exception, subject: Subject) -> Finding:
    """Give what the environment raised as a finding; raises *error* again where it is not the environment's."""
    first = _first(error)
    if isinstance(first, UnknownSplit) or (isinstance(first, BadConfig) and subject.settings):
        raise first
    if isinstance(first, EpisodeError):
        return Finding(seen=f"it broke in {first.stage or 'an episode'} ({first.kind}): {first}")
    if isinstance(first, GymsdkError):
        return Finding(seen=str(first))
    if _is_of(subject, first):
        return Finding(seen=f"the environment's code raised {raised(first)}")
    raise error


def _first(error: BaseException) -> BaseException:
    """Give what a task group brought up first, any other error as it is."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _is_of(subject: Subject, error: BaseException) -> bool:
    """Whether code of the environment's own package stood anywhere on the way to *error*."""
    plugin = subject.environment.plugin
    home = plugin.__name__ if inspect.ismodule(plugin) else type(plugin).__module__
    modules = (str(frame.f_globals.get("__name__", "")) for frame, _ in walk_tb(error.__traceback__))
    return any(name.split(".")[0] == home.split(".")[0] for name in modules)


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Give the list that gymsdk's warnings go to while the block runs, each sentence once."""
    told: list[str] = []
    handler, log = _Told(told), logging.getLogger("gymsdk")
    log.addHandler(handler)
    try:
        yield told
    finally:
        log.removeHandler(handler)


class _Told(logging.Handler):
    def __init__(self, told: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._told = told

    def emit(self, record: logging.LogRecord) -> None:
        sentence = self.format(record)
        if sentence not in self._told and len(self._told) < MOST:
            self._told.append(sentence)
