"""Check that episodes leave no resources behind and change no global state of the process."""

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

from gymsdk.checks.performance import Performance, Script, build_scripts
from gymsdk.checks.report import Check, Finding
from gymsdk.checks.subject import Subject, perturb_generators, read_process_state, restore_process_state
from gymsdk.environment import Environment

WINDOW_EPISODES = 24
"""Episodes between two counts, and before the first one, in which pools fill and caches warm up.

A resource that grows by a quarter of this number in both windows grows with every few episodes.
"""

MIN_EPISODES = 8
"""The smallest window. A smaller one would report leaks that are none."""

MAX_TASKS = 2
"""How many tasks are played, by the oracle, at random and with garbage."""


def _list_threads() -> Iterator[str]:
    # Threads of one kind differ by a number.
    return (f"thread {re.sub(r'[-_ ]?[0-9]+', '', thread.name)!r}" for thread in threading.enumerate())


def _list_open_files() -> Iterator[str]:
    for entry in os.scandir("/proc/self/fd"):
        try:
            target = str(Path(entry.path).readlink())
        except OSError:  # the descriptor that lists the folder is closed by now
            continue
        yield f"open file {target.rstrip('0123456789[]')!r}"


def _list_children() -> Iterator[str]:
    for task in os.scandir("/proc/self/task"):
        try:
            listed = Path(task.path, "children").read_text()
        except OSError:  # the thread has ended meanwhile
            continue
        yield from (f"process {_read_command(child)!r}" for child in listed.split())


def _read_command(process: str) -> str:
    try:
        return Path("/proc", process, "cmdline").read_text().replace("\0", " ").strip()[:80]
    except OSError:
        return "that has ended"


def _list_temporary_files() -> Iterator[str]:
    return (f"temporary file {entry.name[:60]!r}" for entry in os.scandir(tempfile.gettempdir()))


@contextmanager
def _use_private_tempdir() -> Iterator[None]:
    """Redirect the temporary files of this process to a private folder."""
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        tempfile.tempdir = folder
        try:
            yield
        finally:
            tempfile.tempdir = before


def _list_async_tasks() -> Iterator[str]:
    return (f"asyncio task {getattr(task.get_coro(), '__qualname__', '?')!r}" for task in asyncio.all_tasks())


RESOURCE_LISTERS: tuple[Callable[[], Iterator[str]], ...] = (
    _list_threads,
    _list_open_files,
    _list_children,
    _list_temporary_files,
    _list_async_tasks,
)
"""The counted resources. Each function yields the same name for resources of one kind."""


def _count_resources() -> Counter[str]:
    gc.collect()
    return Counter(name for each in RESOURCE_LISTERS for name in each())


async def _check_growth(subject: Subject) -> list[Finding]:
    with _use_private_tempdir():
        window, counts = await _count_windows(subject)
    return [
        Finding(
            seen=f"{window} episodes left {more} {_pluralize(_classify(name))} behind, such as {name},"
            f" and so did the next {window}"
        )
        for name, more in _list_grown_kinds(counts, window)
    ]


async def _count_windows(subject: Subject) -> tuple[int, list[Counter[str]]]:
    """Return the number of episodes per window, and the counts after each of three windows."""
    counts = []
    async with subject.enter_environment() as environment:
        window = await subject.count_affordable(environment, WINDOW_EPISODES, each=3.5, least=MIN_EPISODES)
        played_scripts = await build_scripts(subject, environment, tasks=MAX_TASKS)
        for _ in range(3):
            await _play_episodes(environment, played_scripts, window)
            counts.append(_count_resources())
    return window, counts


def _list_grown_kinds(counts: list[Counter[str]], window: int) -> Iterator[tuple[str, int]]:
    """Yield an example of each kind that grew twice. Names are grouped, because a leak may number them."""
    kinds = [_group_kinds(count) for count in counts]
    for kind in kinds[-1]:
        first, second, third = (each[kind] for each in kinds)
        if min(second - first, third - second) >= window // 4:
            new = counts[-1] - counts[0]
            yield next(name for name in new if _classify(name) == kind), third - second


def _group_kinds(count: Counter[str]) -> Counter[str]:
    kinds: Counter[str] = Counter()
    for name, many in count.items():
        kinds[_classify(name)] += many
    return kinds


def _classify(name: str) -> str:
    return name.partition(" '")[0]


def _pluralize(kind: str) -> str:
    return f"{kind}es" if kind.endswith("s") else f"{kind}s"


async def _play_episodes(environment: Environment, played_scripts: list[Script], episodes: int) -> None:
    for number in range(episodes if played_scripts else 0):
        await Performance(played_scripts[number % len(played_scripts)], environment).play_all()


async def _check_process_state(subject: Subject) -> list[Finding]:
    output = io.StringIO()
    async with subject.enter_environment() as environment:
        # The first episodes import modules and warm caches. A change that is not part of this happens again.
        with restore_process_state():
            played_scripts = await build_scripts(
                subject, environment, tasks=await subject.count_affordable(environment, MAX_TASKS, each=5)
            )
        with perturb_generators(), redirect_stdout(output), redirect_stderr(output):
            before = read_process_state()
            await _play_episodes(environment, played_scripts, len(played_scripts))
            after = read_process_state()
    changed = [name for name in before if after[name] != before[name]]
    findings = [Finding(seen=f"playing {len(played_scripts)} episodes changed {name}") for name in changed]
    if text := output.getvalue():
        fix = "log with the `logging` module, or leave it out: programs read the host's standard output"
        findings.append(Finding(seen=f"playing {len(played_scripts)} episodes printed {text[:80]!r}", mend=fix))
    return findings


CHECKS = (
    Check(
        id="runtime.resources",
        asks="episodes leave no thread, open file, process, temporary file or asyncio task behind",
        why="a host plays millions of episodes in one process; leaks of each episode exhaust it within an hour",
        mend="release in `close` what `reset` acquired, hold shared objects in `lifespan`, and use `with` for the rest",
        run=_check_growth,
    ),
    Check(
        id="runtime.side_effects",
        asks="episodes change nothing that belongs to the whole process, and print nothing",
        why="a global seed or folder that one episode changes affects every other one, and the trainer around them",
        mend="draw from a `random.Random` of the episode, use absolute paths, and leave the process as it was",
        run=_check_process_state,
    ),
)
