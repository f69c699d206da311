"""Run checks, each within a time limit, and build their results."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from threading import Thread
from traceback import walk_tb
from typing import Any, Protocol, TypeVar

from gymsdk.checks import (
    determinism,
    execution,
    floor,
    interfaces,
    isolation,
    leaks,
    loading,
    oracle,
    packaging,
    resources,
)
from gymsdk.checks.loading import LOAD_CHECK
from gymsdk.checks.report import Check, Finding, NotApplicable, Report, Result
from gymsdk.checks.subject import Subject, TooSlow
from gymsdk.concurrency import ThreadPool
from gymsdk.errors import (
    BadConfig,
    EpisodeError,
    GymsdkError,
    UnknownSplit,
    UsageError,
    describe_exception,
    format_suggestion,
)
from gymsdk.plugins.calls import get_first_error

GRACE_SECONDS = 5.0
"""Seconds after its time limit in which a check may still end by itself."""

MAX_WARNINGS = 5
"""The maximum number of warnings in the result of a check."""

FIX_SLOW = "check fewer tasks with --limit; if that does not help, find the hook or tool that takes so long"
FIX_INTERNAL = "report it as a bug of gymsdk, with this message; until then leave the check out with --skip {id}"

SLOW_EPISODE_SECONDS = 0.25
"""The seconds per episode above which a check that exceeds its time limit is skipped, not failed."""

T = TypeVar("T")

FAMILIES = (packaging, loading, determinism, oracle, floor, execution, leaks, isolation, resources, interfaces)

CHECKS: tuple[Check, ...] = tuple(check for family in FAMILIES for check in family.CHECKS)
"""Every check, in the order in which they run."""


class Selectable(Protocol):
    """What `choose_checks` reads of a check."""

    @property
    def id(self) -> str:
        """The id."""


C = TypeVar("C", bound=Selectable)


def select_checks(only: str | Iterable[str] = (), skip: str | Iterable[str] = ()) -> tuple[Check, ...]:
    """Return the checks of an environment that *only* names, or all, except those that *skip* names.

    Args:
        only: Ids of checks, or families such as `packaging`. Empty means all checks.
        skip: Ids of checks, or families.

    Raises:
        UsageError: A name is unknown, or no check is left.
    """
    return choose_checks(CHECKS, only, skip)


def choose_checks(checks: Sequence[C], only: str | Iterable[str], skip: str | Iterable[str]) -> tuple[C, ...]:
    """Return those of *checks* that *only* and *skip* leave, as `select_checks` does."""
    included, excluded = _match_checks(only, checks), _match_checks(skip, checks)
    selected = tuple(check for check in checks if (check.id in included or not included) and check.id not in excluded)
    if not selected:
        raise UsageError("no check is left: every check is skipped; skip fewer, or select more")
    return selected


def check_requirements(checks: Iterable[Check]) -> None:
    """Raise `UsageError` if each of *checks* needs a package that is not installed."""
    reasons = [_describe_missing_package(check) for check in checks]
    if reasons and all(reasons):
        raise UsageError(f"no check can run: {reasons[0]}")


def _describe_missing_package(check: Check) -> str | None:
    """Return which package that *check* needs is missing, and how to install it; `None` if none is."""
    missing = next((package for package in check.needs if find_spec(package) is None), None)
    if missing is None:
        return None
    return f'{missing} is not installed; run: pip install "gymsdk[author]"'


def _match_checks(names: str | Iterable[str], checks: Iterable[Selectable]) -> set[str]:
    ids = [check.id for check in checks]
    matched: set[str] = set()
    for name in [names] if isinstance(names, str) else names:
        matching = {check_id for check_id in ids if check_id == name or check_id.startswith(f"{name}.")}
        if not matching:
            raise UsageError(
                f"no check has the id {name!r}{format_suggestion(name, ids, '`gymsdk check --list` shows them')}"
            )
        matched |= matching
    return matched


class CheckRun:
    """The checks of one subject, run one after another.

    If the environment does not load, the check that finds this fails, and the checks that need it are skipped. Each
    check runs in a thread with its own event loop, so code that blocks the loop blocks that check only.

    Args:
        subject: The environment to check.
        grace: Seconds a check may take to end after its time limit.
        load: The check that must pass before the checks that need the environment to load.
    """

    def __init__(self, subject: Subject, *, grace: float = GRACE_SECONDS, load: Check = LOAD_CHECK) -> None:
        self.subject = subject
        self._grace = grace
        self._load = load
        self._threads = ThreadPool()
        self._skip_reason: str | None = None
        self._warned: set[str] = set()

    async def run_check(self, check: Check) -> Result:
        """Run *check* and return its result."""
        if self._threads.hung:
            return _build_skipped(check, "an earlier check never returned; fix what that check reports first")
        if check.loads and check.id != self._load.id and self._skip_reason is None:
            loaded = await self._run_guarded(self._load)
            if loaded.status == "failed":
                return _build_result(check, loaded.findings, since=time.perf_counter())
        if check.loads and self._skip_reason:
            return _build_skipped(check, self._skip_reason)
        if reason := _describe_missing_package(check):
            return _build_skipped(check, reason)
        return await self._run_guarded(check)

    async def iter_results(self, checks: Iterable[Check]) -> AsyncIterator[Result]:
        """Yield the result of each check as it ends."""
        for check in checks:
            yield await self.run_check(check)

    async def report(self, checks: Iterable[Check]) -> Report:
        """Run all *checks* and return the report."""
        return build_report(self.subject, [result async for result in self.iter_results(checks)])

    async def _run_guarded(self, check: Check) -> Result:
        work = partial(asyncio.run, run_check(check, self.subject))
        try:
            result = await self._threads.run(work, timeout=check.seconds + self._grace)
        except TimeoutError:
            text = f"it did not end within {check.seconds:g} seconds and could not be stopped"
            fix = "find the `async def` hook or tool that never awaits, and make it a plain `def`"
            result = _build_result(check, [Finding(problem=text, fix=fix)], since=time.perf_counter() - check.seconds)
        if check.id == self._load.id:
            self._skip_reason = "it does not load" if result.status == "failed" else ""
        return self._drop_repeated_warnings(result)

    def _drop_repeated_warnings(self, result: Result) -> Result:
        """Return *result* without warnings that an earlier check reported."""
        new = [warning for warning in result.warnings if warning not in self._warned]
        self._warned.update(new)
        return result.model_copy(update={"warnings": new})


def build_report(subject: Subject, results: list[Result]) -> Report:
    """Build the report on *subject* from *results*."""
    version = subject.entry.version if subject.entry else ""
    return Report(environment=subject.name, version=version, seed=subject.seed, results=results)


async def run_check(check: Check, subject: Subject) -> Result:
    """Run *check* alone and return its result.

    Raises:
        UsageError: The caller named a wrong setting or split. Any other error becomes a finding.
    """
    started = time.perf_counter()
    subject.deadline = time.monotonic() + check.seconds
    with _collect_warnings() as warnings:
        try:
            async with asyncio.timeout(check.seconds):
                findings = await check.run(subject)
        except NotApplicable as error:
            return _build_skipped(check, str(error))
        except Exception as error:  # noqa: BLE001  # an error of one check must not stop the others
            first = get_first_error(error)
            is_slow = (subject.episode_seconds or 0.0) > SLOW_EPISODE_SECONDS
            if isinstance(first, TooSlow) or (isinstance(first, TimeoutError) and is_slow):
                return _build_skipped(check, str(first) or _build_timeout_finding(check, subject))
            findings = [_build_error_finding(first, check, subject)]
    return _build_result(check, findings, since=started, warnings=warnings)


def _build_timeout_finding(check: Check, subject: Subject) -> str:
    return (
        f"an episode takes {subject.episode_seconds or 0.0:.1f} s, so the check did not end within"
        f" {check.seconds:g} s; check fewer"
        " tasks with --limit"
    )


def run_in_thread(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of *work*, run in a new thread with its own event loop, also from within a running loop."""
    ended: list[T] = []
    errors: list[BaseException] = []

    def go() -> None:
        try:
            ended.append(asyncio.run(work))
        except BaseException as error:  # noqa: BLE001  # raised again in the caller's thread
            errors.append(error)

    thread = Thread(target=go, name="gymsdk-check", daemon=True)
    thread.start()
    while thread.is_alive():
        # A wait without a limit can miss a Ctrl-C that arrives just before it.
        thread.join(1.0)
    if errors:
        raise errors[0]
    return ended[0]


def _build_result(check: Check, findings: list[Finding], *, since: float, warnings: Iterable[str] = ()) -> Result:
    return Result(
        id=check.id,
        requirement=check.requirement,
        status="failed" if findings else "passed",
        why=check.why,
        fix=check.fix,
        findings=findings,
        warnings=list(warnings),
        seconds=round(time.perf_counter() - since, 3),
    )


def _build_skipped(check: Check, reason: str) -> Result:
    return Result(
        id=check.id, requirement=check.requirement, status="skipped", why=check.why, fix=check.fix, reason=reason
    )


def _build_error_finding(error: BaseException, check: Check, subject: Subject) -> Finding:
    """Return *error* as a finding, or raise it if it is the caller's mistake."""
    if isinstance(error, UnknownSplit) or (isinstance(error, BadConfig) and subject.settings):
        raise error
    if isinstance(error, TimeoutError) and subject.deadline <= time.monotonic():
        return Finding(problem=f"it did not end within {check.seconds:g} seconds", fix=FIX_SLOW)
    if isinstance(error, EpisodeError):
        return Finding(problem=f"it failed in {error.stage or 'an episode'} ({error.kind}): {error}")
    if isinstance(error, GymsdkError):
        return Finding(problem=str(error))
    if _involves_environment(subject, error):
        return Finding(problem=f"the environment's code raised {describe_exception(error)}")
    return Finding(
        problem=f"the check itself failed: {describe_exception(error)}", fix=FIX_INTERNAL.format(id=check.id)
    )


def _involves_environment(subject: Subject, error: BaseException) -> bool:
    """Return whether the traceback of *error* contains code of the environment's package."""
    try:
        plugin = subject.environment.plugin
    except GymsdkError:
        return False
    home = plugin.__name__ if inspect.ismodule(plugin) else type(plugin).__module__
    modules = (str(frame.f_globals.get("__name__", "")) for frame, _ in walk_tb(error.__traceback__))
    return any(name.split(".")[0] == home.split(".")[0] for name in modules)


@contextmanager
def _collect_warnings() -> Iterator[list[str]]:
    """Collect gymsdk's distinct warnings while the block runs."""
    warnings: list[str] = []
    handler, log = _WarningHandler(warnings), logging.getLogger("gymsdk")
    log.addHandler(handler)
    try:
        yield warnings
    finally:
        log.removeHandler(handler)


class _WarningHandler(logging.Handler):
    def __init__(self, warnings: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._warnings = warnings

    def emit(self, record: logging.LogRecord) -> None:
        # The episodes of a check have no id.
        sentence = self.format(record).replace("episode without an id: ", "an episode: ")
        if sentence not in self._warnings and len(self._warnings) < MAX_WARNINGS:
            self._warnings.append(sentence)
