"""Check that the same seed gives the same tasks, openings, answers and verdicts, also in another interpreter."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from gymsdk import jsonl
from gymsdk.checks.loading import is_numbering_field
from gymsdk.checks.performance import Performance, Script, build_scripts, draw_tasks
from gymsdk.checks.report import Check, Finding, NotApplicable
from gymsdk.checks.subject import Plain, Subject, find_difference, to_plain
from gymsdk.environment import Environment
from gymsdk.episode import EpisodeRunner
from gymsdk.errors import BrokenEnvironment, EpisodeError
from gymsdk.types import Item, Row, Task

INTERPRETER_SECONDS = 45.0
"""Time limit of the other interpreter."""

PROGRAM = """
import asyncio, sys
from gymsdk.checks.determinism import draw_and_open
from gymsdk.jsonl import parse_json

request = parse_json(sys.stdin.buffer.read())
result = asyncio.run(draw_and_open(**request)).model_dump_json()
sys.stdout.buffer.write(b"\\n" + result.encode())
"""

MAX_ROWS = 6
"""How many tasks of a split are compared."""

MAX_TASKS = 3
"""How many tasks are played."""

MAX_OPENED = 2
"""How many tasks of a split another interpreter opens."""

MAX_SEEDS = 24
"""How many seeds have their first task compared. One seed's first tasks, equally many, are the reference."""


@dataclass(frozen=True, slots=True)
class ProcessResult:
    """The exit code, the standard output, and the last line of standard error."""

    code: int
    output: bytes
    last: str


async def run_program(
    program: str,
    *arguments: str,
    seconds: float,
    stdin: bytes = b"",
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> ProcessResult:
    """Run *program* with *stdin* as its standard input. Raises `TimeoutError` after *seconds*."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program, *arguments),
        cwd=folder,
        env={**os.environ, **(environment or {})},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(seconds):
            output, errors = await process.communicate(stdin)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None, "the process has ended"
    return ProcessResult(process.returncode, output, errors.decode(errors="replace").strip().rpartition("\n")[2])


class Drawn(BaseModel):
    """The first rows of a split, and the openings of the first of them."""

    model_config = ConfigDict(frozen=True)

    rows: list[Row]
    openings: list[list[Item]] = []


async def draw_and_open(
    *, name: str, settings: dict[str, object], split: str, seed: int, count: int, opened: int
) -> Drawn:
    """Draw *count* rows of *split* in this interpreter and open the first *opened* of them."""
    from gymsdk.plugins.registry import load

    subject = Subject(name, lambda: load(name, **settings), seed=seed, count=count, split=split)
    async with subject.enter_environment() as environment:
        openings = [await read_opening(environment, task, seed) for task in subject.tasks[:opened]]
    return Drawn.model_validate({"rows": [to_plain(task.row()) for task in subject.tasks], "openings": openings})


async def read_opening(environment: Environment, task: Task, seed: int) -> Plain:
    """Return the opening items of an episode of *task*, or its failure, as plain JSON."""
    sitting = EpisodeRunner(environment)
    try:
        return to_plain((await sitting.open(task, seed=seed)).transcript.opening)
    except EpisodeError as error:
        return [{"failure": error.kind}]
    finally:
        await sitting.close()


async def draw_in_new_interpreter(
    subject: Subject, split: str, *, seed: int, count: int, opened: int = 0, hash_seed: int = 1
) -> Drawn:
    """Draw rows of *split* in a new interpreter.

    Raises:
        NotApplicable: The environment is not installed, or its settings cannot be written as JSON.
        BrokenEnvironment: The environment fails in the new interpreter.
    """
    question = _build_request(subject, split=split, seed=seed, count=count, opened=opened)
    hashed = {"PYTHONHASHSEED": str(hash_seed)}
    ended = await run_program(PROGRAM, seconds=INTERPRETER_SECONDS, stdin=question, environment=hashed)
    if ended.code:
        raise BrokenEnvironment(f"a new process cannot draw its rows: {ended.last}")
    # The environment itself may print lines before the last one.
    return Drawn.model_validate_json(ended.output.rpartition(b"\n")[2])


def _build_request(subject: Subject, **parameters: str | int) -> bytes:
    if subject.entry is None:
        raise NotApplicable("the environment is not installed, so no other process can load it")
    try:
        return jsonl.dump_json({"name": subject.name, "settings": dict(subject.settings), **parameters})
    except (TypeError, ValueError):
        raise NotApplicable("its settings cannot be written as JSON, so another process cannot receive them") from None


async def _check_determinism(subject: Subject) -> list[Finding]:
    rows = [
        finding
        for split in _check_splits(subject)
        for finding in [*await _check_rows(subject, split), *_find_constant_draws(subject, split)]
    ]
    return rows + await _check_plays(subject)


def _check_splits(subject: Subject) -> tuple[str, ...]:
    return () if subject.given is not None else subject.environment.splits


async def _check_rows(subject: Subject, split: str) -> list[Finding]:
    expected = _draw_rows(subject.make(), split, subject.seed)
    about = f"split {split!r} with seed {subject.seed}, drawn"
    for where, again in (
        ("a second time", subject.make()),
        ("after another seed", _enter_used_environment(subject, split)),
    ):
        if change := find_difference(expected, _draw_rows(again, split, subject.seed), "row"):
            return [Finding(seen=f"{about} {where}: {change}")]
    change = await _compare_interpreters(subject, split, expected)
    fix = "sort sets before you draw from them or print them, and seed with a string or a number, never with hash()"
    return [Finding(seen=f"{about} in another interpreter: {change}", mend=fix)] if change else []


def _find_constant_draws(subject: Subject, split: str) -> list[Finding]:
    """Find fields that vary between tasks but are the same in the first task of every seed."""
    environment = subject.make()
    row = [task.row() for task in draw_tasks(environment, split, subject.seed, MAX_SEEDS)]
    opening = [task.row() for seed in range(MAX_SEEDS) for task in draw_tasks(environment, split, seed, 1)]
    if len(opening) < MAX_SEEDS or all(each == opening[0] for each in opening):
        # There are too few tasks, or the split does not depend on the seed.
        return []
    fix = "if kinds of tasks alternate, let the seed choose which kind comes first"
    return [
        Finding(
            seen=f"split {split!r}: {key!r} is {_list_values(opening, key)[0]!r} in the first task of every seed",
            mend=fix,
        )
        for key in row[0]
        if not is_numbering_field(key)
        and 1 < len(_list_values(row, key)) <= MAX_SEEDS // 2
        and len(_list_values(opening, key)) == 1
    ]


def _list_values(rows: list[Row], key: str) -> list[str | int | bool]:
    """Return the distinct values of a row's field, if they can name a kind of task."""
    return list(dict.fromkeys(row[key] for row in rows if isinstance(row.get(key), (str, int, bool))))


async def _compare_interpreters(subject: Subject, split: str, expected: list[Plain]) -> str | None:
    """Return where another interpreter draws *split* differently or opens its first tasks differently."""
    try:
        other = await draw_in_new_interpreter(subject, split, seed=subject.seed, count=len(expected), opened=MAX_OPENED)
    except NotApplicable:
        return None
    if change := find_difference(expected, to_plain(other.rows), "row"):
        return change
    async with subject.enter_environment() as environment:
        tasks = draw_tasks(environment, split, subject.seed, MAX_OPENED)
        openings = [await read_opening(environment, task, subject.seed) for task in tasks]
    return find_difference(openings, to_plain(other.openings), "opening")


def _draw_rows(environment: Environment, split: str, seed: int) -> list[Plain]:
    return [to_plain(task.row()) for task in draw_tasks(environment, split, seed, MAX_ROWS)]


def _enter_used_environment(subject: Subject, split: str) -> Environment:
    """Return an environment that has drawn tasks with another seed before."""
    environment = subject.make()
    _draw_rows(environment, split, subject.seed + 1)
    return environment


async def _check_plays(subject: Subject) -> list[Finding]:
    async with subject.enter_environment() as environment:
        tasks = await subject.count_affordable(environment, MAX_TASKS, each=8)
        findings = [
            await _compare_replay(subject, environment, each)
            for each in await build_scripts(subject, environment, tasks=tasks)
        ]
    return [finding for finding in findings if finding]


async def _compare_replay(subject: Subject, environment: Environment, script: Script) -> Finding | None:
    once, again = [await Performance(script, environment).play_all() for _ in range(2)]
    async with subject.enter_environment() as other:
        fresh = await Performance(script, other).play_all()
    for where, second in (("again", again), ("in a new environment", fresh)):
        if change := find_difference(once, second):
            return Finding(seen=f"{script.title}, played {where}: {change}")
    return None


CHECKS = (
    Check(
        id="runtime.seed_control",
        asks="the same seed gives the same tasks, openings, answers and verdicts",
        why="a run that cannot be repeated cannot be debugged, resumed or compared",
        mend="draw everything from random.Random of the hook's `split` and `seed`, nothing from the global generators, "
        "the clock or the order of a set, and keep nothing in the module between episodes",
        run=_check_determinism,
    ),
)
