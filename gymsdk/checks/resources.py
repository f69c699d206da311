"""Resources: what episodes leave behind in the process, counted while many are played; what they change in passing."""

from __future__ import annotations

import asyncio
import gc
import io
import os
import re
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

from gymsdk.checks.check import Check, Finding
from gymsdk.checks.performance import Performance, Script, scripts
from gymsdk.checks.process import pictured, put_back, stirred
from gymsdk.checks.subject import Subject
from gymsdk.environment import Environment

WINDOW = 24
"""Episodes between two counts, and before the first: pools fill, caches warm.

What grows by a quarter of it in both windows grows with every few episodes.
"""

LEAST = 8
"""Episodes of the smallest window: fewer would take for a leak what is none."""

TASKS = 2
"""Tasks that are played, by the oracle, at random and with garbage."""


def _threads() -> Iterator[str]:
    # Threads of one kind are told apart by a number.
    return (f"thread {re.sub(r'[-_ ]?[0-9]+', '', thread.name)!r}" for thread in threading.enumerate())


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
        window, counts = await _counts(subject)
    return [
        Finding(
            seen=f"{window} episodes left {more} {_plural(_kind(name))} behind, such as {name}, and so did the next"
        )
        for name, more in _families(counts, window)
    ]


async def _counts(subject: Subject) -> tuple[int, list[Counter[str]]]:
    """Give how many episodes a window has, and what was counted at the ends of two."""
    counts = []
    async with subject.enter_environment() as environment:
        window = await subject.count_affordable(environment, WINDOW, each=3.5, least=LEAST)
        played = await scripts(subject, environment, tasks=TASKS)
        for _ in range(3):
            await _played(environment, played, window)
            counts.append(_counted())
    return window, counts


def _families(counts: list[Counter[str]], window: int) -> Iterator[tuple[str, int]]:
    """Yield what has grown twice, with one of its names: what leaks may be named by another number each time."""
    kinds = [_kinds(count) for count in counts]
    for kind in kinds[-1]:
        first, second, third = (each[kind] for each in kinds)
        if min(second - first, third - second) >= window // 4:
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


async def _played(environment: Environment, played: list[Script], episodes: int) -> None:
    for number in range(episodes if played else 0):
        await Performance(played[number % len(played)], environment).play_all()


async def _changed(subject: Subject) -> list[Finding]:
    said = io.StringIO()
    async with subject.enter_environment() as environment:
        # The first episodes import and warm what they need; what they change otherwise, the next change again.
        with put_back():
            played = await scripts(subject, environment, tasks=await subject.count_affordable(environment, TASKS, each=5))
        with stirred(), redirect_stdout(said), redirect_stderr(said):
            before = pictured()
            await _played(environment, played, len(played))
            after = pictured()
    changed = [name for name in before if after[name] != before[name]]
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
        run=_grown,
    ),
    Check(
        id="runtime.side_effects",
        asks="episodes change nothing that belongs to the whole process, and print nothing",
        why="a seed set or a folder changed in one episode changes every other one, and the trainer around them",
        mend="draw from a `random.Random` of your own, use absolute paths, and leave the process as it was",
        run=_changed,
    ),
)
