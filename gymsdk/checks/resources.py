"""Check that episodes are closed once, leave nothing behind, and do not block the event loop."""

from __future__ import annotations

import asyncio
import gc
import io
import logging
import os
import re
import tempfile
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

from gymsdk.checks.generators import perturb_generators, read_generator_states
from gymsdk.checks.phases import GARBAGE_TURNS, Performance, Script, build_scripts, draw_tasks, sample_tasks
from gymsdk.checks.report import Check, Finding
from gymsdk.checks.subject import Subject, read_process_state
from gymsdk.environment import Environment
from gymsdk.episode import play
from gymsdk.errors import EpisodeError
from gymsdk.models.scripted import ScriptedModel, build, play_null
from gymsdk.plugins.calls import MAX_LOOP_BLOCK_SECONDS
from gymsdk.types import Action, Budget, Episode, Item, Row, Step, Task, Verdict

WINDOW_EPISODES = 24
"""Episodes between two counts, and before the first one, in which pools fill and caches warm up.

A resource that grows by a quarter of this number in both windows grows with every few episodes.
"""

MIN_EPISODES = 8
"""The smallest window. A smaller one would report false leaks."""

STDOUT = 1
"""The descriptor of standard output."""

MAX_DRAWN_TASKS = 8
"""How many tasks of each split are drawn while the state of the process is watched."""

MAX_TASKS = 2
"""The number of tasks to play: by the oracle, at random, with garbage, and to every kind of end."""


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
    # Objects in reference cycles hold their files until the collector runs.
    gc.collect()
    return Counter(name for list_names in RESOURCE_LISTERS for name in list_names())


async def _check_growth(subject: Subject) -> list[Finding]:
    with _use_private_tempdir():
        window, counts = await _count_windows(subject)
    return [
        Finding(
            problem=f"{window} episodes left {more} {_pluralize(_classify(name))} behind, such as {name},"
            f" and so did the next {window}"
        )
        for name, more in _list_grown_kinds(counts, window)
    ]


async def _count_windows(subject: Subject) -> tuple[int, list[Counter[str]]]:
    """Return the number of episodes per window, and the counts after each of three windows."""
    counts = []
    async with subject.enter_environment() as environment:
        window = await subject.count_affordable(environment, WINDOW_EPISODES, episodes=3.5, least=MIN_EPISODES)
        scripts = await build_scripts(subject, environment, tasks=MAX_TASKS)
        for _ in range(3):
            await _play_episodes(environment, scripts, window)
            # Tasks that have nothing left to do end in the next pass of the event loop.
            await asyncio.sleep(0)
            counts.append(_count_resources())
    return window, counts


def _list_grown_kinds(counts: list[Counter[str]], window: int) -> Iterator[tuple[str, int]]:
    """Yield an example of each kind that grew twice. Names are grouped, because a leak may number them."""
    kinds = [_group_kinds(count) for count in counts]
    for kind in kinds[-1]:
        first, second, third = (group[kind] for group in kinds)
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


async def _play_episodes(environment: Environment, scripts: list[Script], episodes: int) -> None:
    for number in range(episodes if scripts else 0):
        await Performance(scripts[number % len(scripts)], environment).play_all()


async def _check_process_state(subject: Subject) -> list[Finding]:
    async with subject.enter_environment() as environment:
        # The first episodes import modules and warm caches. A change that is not part of this happens again.
        scripts = await build_scripts(
            subject, environment, tasks=await subject.count_affordable(environment, MAX_TASKS, episodes=5)
        )
    with perturb_generators(), _capture_output() as printed:
        generators = read_generator_states()
        async with subject.enter_environment() as environment:
            before = read_process_state()
            for split in subject.splits if subject.file_tasks is None else ():
                draw_tasks(environment, split, subject.seed, MAX_DRAWN_TASKS)
            await _play_episodes(environment, scripts, len(scripts))
            after = read_process_state()
    # `lifespan` may change the process, but not a generator that others use.
    before |= generators
    changed = [name for name in before if after[name] != before[name]]
    findings = [Finding(problem=f"playing {len(scripts)} episodes changed {name}") for name in changed]
    if text := "".join(printed):
        fix = (
            "log with the `logging` module, read what child processes print through a pipe, or leave it out: programs"
            " read the host's standard output"
        )
        findings.append(Finding(problem=f"playing {len(scripts)} episodes printed {text[:80]!r}", fix=fix))
    return findings


@contextmanager
def _capture_output() -> Iterator[list[str]]:
    """Yield a list that contains, after the block, what Python and child processes printed inside it."""
    printed: list[str] = []
    python_output = io.StringIO()
    # A file, not a pipe: a pipe that is not read blocks its writer when it is full.
    with tempfile.TemporaryFile() as file:
        with _redirect_descriptor(file.fileno()), redirect_stdout(python_output), redirect_stderr(python_output):
            yield printed
        file.seek(0)
        printed += [python_output.getvalue(), file.read().decode(errors="replace")]


@contextmanager
def _redirect_descriptor(target: int) -> Iterator[None]:
    """Let descriptor 1, which child processes inherit, lead to *target* inside the block."""
    try:
        saved = os.dup(STDOUT)
    except OSError:
        # It is closed, so that no code can print.
        yield
        return
    os.dup2(target, STDOUT)
    try:
        yield
    finally:
        os.dup2(saved, STDOUT)
        os.close(saved)


SHORT_DEADLINE_SECONDS = 0.05
"""Seconds after which an episode is cancelled, or its deadline expires."""


class _CountingEnvironment:
    """An environment that counts how often its episodes are opened and closed."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self.name = environment.name
        self.opened: list[Episode] = []
        self.closed: Counter[int] = Counter()
        self.errors: list[str] = []

    async def reset(
        self, row: Row | Task, *, seed: int = 0, id: str = "", repeat: int = 0, deadline: float | None = None
    ) -> Episode:
        """Open an episode and record it."""
        episode = await self._environment.reset(row, seed=seed, id=id, repeat=repeat, deadline=deadline)
        self.opened.append(episode)
        return episode

    async def step(self, episode: Episode, action: Action) -> Step:
        """Answer one action."""
        return await self._environment.step(episode, action)

    async def verify(self, episode: Episode) -> Verdict:
        """Judge the episode."""
        return await self._environment.verify(episode)

    async def solve(self, episode: Episode) -> list[Action] | None:
        """Return the next action of a perfect policy."""
        return await self._environment.solve(episode)

    async def close(self, episode: Episode) -> None:
        """Close the episode and record an error."""
        self.closed[id(episode)] += 1
        try:
            await self._environment.close(episode)
        except EpisodeError as error:
            self.errors.append(str(error))


Ending = Callable[[_CountingEnvironment, Task, Budget], Awaitable[object]]


async def _play_oracle(environment: _CountingEnvironment, task: Task, budget: Budget) -> object:
    return await play(environment, build("oracle"), task, budget=budget)


async def _play_nothing(environment: _CountingEnvironment, task: Task, budget: Budget) -> object:
    return await play(environment, ScriptedModel("null", play_null), task, budget=budget)


async def _exhaust_turns(environment: _CountingEnvironment, task: Task, budget: Budget) -> object:
    return await play(environment, build("random"), task, budget=budget.model_copy(update={"turns": 1}))


async def _play_garbage(environment: _CountingEnvironment, task: Task, budget: Budget) -> object:
    async def choose(_request: Item, episode: Episode | None) -> list[Item]:
        calls = sum(item.get("type") == "function_call" for item in episode.transcript.items) if episode else 0
        return GARBAGE_TURNS[min(calls, len(GARBAGE_TURNS) - 1)]

    return await play(environment, ScriptedModel("garbage", choose), task, budget=budget)


async def _wait_forever(_request: Item, _episode: Episode | None) -> list[Item]:
    await asyncio.Event().wait()
    return []


async def _cancel_episode(environment: _CountingEnvironment, task: Task, budget: Budget) -> object:
    playing = asyncio.ensure_future(play(environment, ScriptedModel("never", _wait_forever), task, budget=budget))
    await asyncio.wait({playing}, timeout=SHORT_DEADLINE_SECONDS)
    playing.cancel()
    return await asyncio.gather(playing, return_exceptions=True)


async def _exhaust_deadline(environment: _CountingEnvironment, task: Task, budget: Budget) -> object:
    short_budget = budget.model_copy(update={"seconds": SHORT_DEADLINE_SECONDS})
    return await play(environment, ScriptedModel("never", _wait_forever), task, budget=short_budget)


ENDINGS: dict[str, Ending] = {
    "played by the oracle": _play_oracle,
    "answered with nothing": _play_nothing,
    "out of turns": _exhaust_turns,
    "played with garbage": _play_garbage,
    "cancelled": _cancel_episode,
    "out of time": _exhaust_deadline,
}


async def _check_closing(subject: Subject) -> list[Finding]:
    findings = []
    async with subject.enter_environment() as environment:
        tasks = await subject.count_affordable(environment, MAX_TASKS, episodes=len(ENDINGS))
        for task in sample_tasks(subject.tasks, tasks):
            for description, ending in ENDINGS.items():
                counting = _CountingEnvironment(environment)
                await ending(counting, task, subject.budget)
                findings += [
                    Finding(problem=f"an episode {description}: {problem}") for problem in _list_miscounts(counting)
                ]
    return list({finding.problem: finding for finding in findings}.values())


def _list_miscounts(environment: _CountingEnvironment) -> list[str]:
    counts = [environment.closed[id(episode)] for episode in environment.opened]
    return [f"it was closed {count} times" for count in counts if count != 1] + environment.errors


MAX_BLOCKING_TASKS = 3
"""How many tasks are played, by the oracle and at random."""

PLAY_ROUNDS = 2
"""How often each script is played. On a busy machine, any code can exceed the limit once."""


class _BlockedLoopHandler(logging.Handler):
    """Counts the warnings about code that blocked the event loop."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.counts: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        if "held the event loop" in str(record.msg):
            self.counts[re.sub(r" of environment '.*'", "", str(record.args[0] if record.args else ""))] += 1  # type: ignore[index]  # our own message has arguments


async def _check_blocking(subject: Subject) -> list[Finding]:
    handler, log = _BlockedLoopHandler(), logging.getLogger("gymsdk")
    async with subject.enter_environment() as environment:
        scripts = await build_scripts(
            subject, environment, tasks=await subject.count_affordable(environment, MAX_BLOCKING_TASKS, episodes=6)
        )
        # Only now: the first episodes import modules and warm caches.
        log.addHandler(handler)
        try:
            for script in scripts * PLAY_ROUNDS:
                await Performance(script, environment).play_all()
        finally:
            log.removeHandler(handler)
    episodes = len(scripts) * PLAY_ROUNDS
    return [
        Finding(
            problem=f"{name} held the event loop for more than {MAX_LOOP_BLOCK_SECONDS * 1e3:.0f} ms"
            f" {times} times in {episodes} episodes"
        )
        for name, times in handler.counts.items()
        # Code that really blocks does so again and again; a busy machine causes single warnings.
        if times >= max(3, episodes // 4)
    ]


CHECKS: tuple[Check, ...] = (
    Check(
        id="runtime.resources",
        requirement="episodes leave no thread, open file, process, temporary file or asyncio task behind",
        why="a host plays millions of episodes in one process; leaks of each episode exhaust it within an hour",
        fix="release in `close` what `reset` acquired, hold shared objects in `lifespan`, and use `with` for the rest",
        run=_check_growth,
    ),
    Check(
        id="runtime.side_effects",
        requirement="episodes change nothing that belongs to the whole process, and print nothing",
        why="a global seed or folder that one episode changes affects every other one, and the trainer around them",
        fix="draw from a `random.Random` of the episode, use absolute paths, and leave the process as it was",
        run=_check_process_state,
    ),
    Check(
        id="runtime.close_once",
        requirement="every episode is closed exactly once and without an error, however it ends",
        why="what `close` does not release is lost to every later episode, and an error in it goes unnoticed",
        fix="let `close` always release what `reset` acquired, and let it raise nothing",
        run=_check_closing,
    ),
    Check(
        id="runtime.blocking",
        requirement="no `async def` hook or tool holds the event loop",
        why="while it blocks, every other episode of the process waits, and deadlines pass",
        fix="write it as a plain `def`, which runs in a thread, or put CPU-heavy work into an `@offload` function",
        run=_check_blocking,
    ),
)
