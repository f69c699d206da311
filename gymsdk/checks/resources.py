"""Resources: what episodes leave behind in the process, counted while many are played; what they change in passing."""

from __future__ import annotations

import asyncio
import gc
import io
import os
import random
import signal
import sys
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

from gymsdk.checks.check import Check, Finding
from gymsdk.checks.performance import Performance, Script, plain, scripts
from gymsdk.checks.subject import Subject
from gymsdk.environment import Environment

WARM_UP = 24
"""Episodes before anything is counted: pools fill, caches warm."""

WINDOW = 24
"""Episodes between two counts; what grows by a quarter of it in both windows grows with every few episodes."""

TASKS = 2
"""Tasks that are played, by the oracle, at random and with garbage."""


def _threads() -> Iterator[str]:
    return (f"thread {thread.name.rstrip('0123456789-_ ()')!r}" for thread in threading.enumerate())


def _files() -> Iterator[str]:
    for entry in os.scandir("/proc/self/fd"):
        try:
            target = str(Path(entry.path).readlink())
        except OSError:  # the one that lists them is gone by now
            continue
        yield f"open file {target.rstrip('0123456789[]')!r}"


def _children() -> Iterator[str]:
    for task in os.scandir("/proc/self/task"):
        try:
            listed = Path(task.path, "children").read_text()
        except OSError:  # a thread that has ended meanwhile
            continue
        yield from (f"process {_command(child)!r}" for child in listed.split())


def _command(process: str) -> str:
    try:
        return Path("/proc", process, "cmdline").read_text().replace("\0", " ").strip()[:80]
    except OSError:
        return "that has ended"


def _temporary() -> Iterator[str]:
    return (f"temporary file {entry.name[:60]!r}" for entry in os.scandir(tempfile.gettempdir()))


@contextmanager
def _own_folder() -> Iterator[None]:
    """Have temporary files of this process made in a folder where nobody else makes any."""
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        tempfile.tempdir = folder
        try:
            yield
        finally:
            tempfile.tempdir = before


def _tasks() -> Iterator[str]:
    return (f"asyncio task {getattr(task.get_coro(), '__qualname__', '?')!r}" for task in asyncio.all_tasks())


COUNTED: tuple[Callable[[], Iterator[str]], ...] = (_threads, _files, _children, _temporary, _tasks)
"""What is counted: each yields a name for every one there is, alike for those of one kind."""


def _counted() -> Counter[str]:
    gc.collect()
    return Counter(name for each in COUNTED for name in each())


async def _grown(subject: Subject) -> list[Finding]:
    with _own_folder():
        counts = await _counts(subject)
    return [
        Finding(
            seen=f"{WINDOW} episodes left {more} {_plural(_kind(name))} behind, such as {name}, and so did the next"
        )
        for name, more in _families(counts)
    ]


async def _counts(subject: Subject) -> list[Counter[str]]:
    async with subject.fresh() as environment:
        played = await scripts(subject, environment, tasks=TASKS)
        await _played(subject, environment, played, WARM_UP)
        counts = [_counted()]
        for _ in range(2):
            await _played(subject, environment, played, WINDOW)
            counts.append(_counted())
    return counts


def _families(counts: list[Counter[str]]) -> Iterator[tuple[str, int]]:
    """Yield what has grown twice, with one of its names: what leaks may be named by another number each time."""
    kinds = [_kinds(count) for count in counts]
    for kind in kinds[-1]:
        first, second, third = (each[kind] for each in kinds)
        if min(second - first, third - second) >= WINDOW // 4:
            new = counts[-1] - counts[0]
            yield next(name for name in new if _kind(name) == kind), third - second


def _kinds(count: Counter[str]) -> Counter[str]:
    kinds: Counter[str] = Counter()
    for name, many in count.items():
        kinds[_kind(name)] += many
    return kinds


def _kind(name: str) -> str:
    return name.partition(" '")[0]


def _plural(kind: str) -> str:
    return f"{kind}es" if kind.endswith("s") else f"{kind}s"


async def _played(subject: Subject, environment: Environment, played: list[Script], episodes: int) -> None:
    for number in range(episodes):
        await Performance(played[number % len(played)], environment, subject.budget).whole()


def _numpy() -> Any:
    numpy = sys.modules.get("numpy")
    return plain(numpy.random.get_state(legacy=False)) if numpy else None


LEFT_ALONE: dict[str, Callable[[], Any]] = {
    "os.environ": lambda: dict(os.environ),
    "the current folder": os.getcwd,
    "sys.path": lambda: list(sys.path),
    "the state of the global `random`": random.getstate,
    "the state of the global `numpy.random`": _numpy,
    "the handler of SIGINT": partial(signal.getsignal, signal.SIGINT),
    "the handler of SIGTERM": partial(signal.getsignal, signal.SIGTERM),
    "the handler of SIGALRM": partial(signal.getsignal, signal.SIGALRM),
    "warnings.filters": lambda: list(warnings.filters),
}
"""What belongs to the whole process: no episode may change it."""


@contextmanager
def _stirred() -> Iterator[None]:
    """Put the global generators where no episode has left them: one that seeds them as before changes nothing else."""
    generators = (random, numpy.random) if (numpy := sys.modules.get("numpy")) else (random,)
    kept = [random.getstate(), *(each.get_state() for each in generators[1:])]
    for each in generators:
        each.seed(int.from_bytes(os.urandom(4), "big"))
    try:
        yield
    finally:
        random.setstate(kept[0])
        for each, state in zip(generators[1:], kept[1:], strict=True):
            each.set_state(state)


async def _changed(subject: Subject) -> list[Finding]:
    said = io.StringIO()
    async with subject.fresh() as environment:
        played = await scripts(subject, environment, tasks=TASKS)
        with _stirred(), redirect_stdout(said), redirect_stderr(said):
            before = {name: look() for name, look in LEFT_ALONE.items()}
            await _played(subject, environment, played, len(played))
            changed = [name for name, look in LEFT_ALONE.items() if look() != before[name]]
    findings = [Finding(seen=f"playing {len(played)} episodes changed {name}") for name in changed]
    if text := said.getvalue():
        mend = "log with the `logging` module, or leave it out: standard output is the host's, for programs to read"
        findings.append(Finding(seen=f"playing {len(played)} episodes printed {text[:80]!r}", mend=mend))
    return findings


CHECKS = (
    Check(
        id="runtime.resources",
        asks="episodes leave no thread, open file, process, temporary file or asyncio task behind",
        why="a host plays millions of episodes in one process; what each leaves behind ends it in an hour",
        mend="release in `close` what `reset` took, hold what is shared in `lifespan`, and use `with` for the rest",
        look=_grown,
    ),
    Check(
        id="runtime.side_effects",
        asks="episodes change nothing that belongs to the whole process, and print nothing",
        why="a seed set or a folder changed in one episode changes every other one, and the trainer around them",
        mend="draw from a `random.Random` of your own, use absolute paths, and leave the process as it was",
        look=_changed,
    ),
)
