"""Determinism: with the same seed an environment gives the same, twice, anew, and in another interpreter."""

from __future__ import annotations

from gymsdk.checks import elsewhere
from gymsdk.checks.check import Check, Finding, NotApplicable
from gymsdk.checks.loading import numbers
from gymsdk.checks.performance import Performance, Script, scripts
from gymsdk.checks.plain import Plain, difference, plain
from gymsdk.checks.subject import Subject
from gymsdk.checks.tasks import first
from gymsdk.environment import Environment
from gymsdk.types import Row

ROWS = 6
"""Tasks of a split that are compared."""

TASKS = 3
"""Tasks that are played."""

OPENED = 2
"""Tasks of a split that another interpreter opens."""

SEEDS = 24
"""Seeds whose first tasks are compared with the first so many tasks of one seed."""


async def _look(subject: Subject) -> list[Finding]:
    rows = [found for split in _splits(subject) for found in [*await _rows(subject, split), *_alike(subject, split)]]
    return rows + await _plays(subject)


def _splits(subject: Subject) -> tuple[str, ...]:
    return () if subject.given is not None else subject.environment.splits


async def _rows(subject: Subject, split: str) -> list[Finding]:
    drawn = _drawn(subject.make(), split, subject.seed)
    about = f"split {split!r} with seed {subject.seed}, drawn"
    for where, again in (("a second time", subject.make()), ("after another seed", _stirred(subject, split))):
        if found := difference(drawn, _drawn(again, split, subject.seed), "row"):
            return [Finding(seen=f"{about} {where}: {found}")]
    found = await _elsewhere(subject, split, drawn)
    mend = "sort sets before drawing from them or showing them, and seed with a string or a number, never with hash()"
    return [Finding(seen=f"{about} in another interpreter: {found}", mend=mend)] if found else []


def _alike(subject: Subject, split: str) -> list[Finding]:
    """Find what never varies in the first task of a seed, though it varies from task to task."""
    environment = subject.make()
    row = [task.row() for task in first(environment, split, subject.seed, SEEDS)]
    opening = [task.row() for seed in range(SEEDS) for task in first(environment, split, seed, 1)]
    if len(opening) < SEEDS or all(each == opening[0] for each in opening):
        # There are not so many, or the split does not depend on the seed.
        return []
    mend = "where kinds of tasks follow each other in turn, let the seed choose which comes first"
    return [
        Finding(
            seen=f"split {split!r}: {key!r} is {_values(opening, key)[0]!r} in the first task of every seed", mend=mend
        )
        for key in row[0]
        if not numbers(key) and 1 < len(_values(row, key)) <= SEEDS // 2 and len(_values(opening, key)) == 1
    ]


def _values(rows: list[Row], key: str) -> list[str | int | bool]:
    """Give the values of a row's field without repeats, of those that a kind of task may be told by."""
    return list(dict.fromkeys(row[key] for row in rows if isinstance(row.get(key), (str, int, bool))))


async def _elsewhere(subject: Subject, split: str, drawn: list[Plain]) -> str | None:
    """Give where another interpreter draws *split* otherwise, or opens its first tasks with something else."""
    try:
        there = await elsewhere.asked(subject, split, seed=subject.seed, count=len(drawn), opened=OPENED)
    except NotApplicable:
        return None
    if found := difference(drawn, plain(there.rows), "row"):
        return found
    async with subject.enter_environment() as environment:
        tasks = first(environment, split, subject.seed, OPENED)
        here = [await elsewhere.opening(environment, task, subject.seed) for task in tasks]
    return difference(here, plain(there.openings), "opening")


def _drawn(environment: Environment, split: str, seed: int) -> list[Plain]:
    return [plain(task.row()) for task in first(environment, split, seed, ROWS)]


def _stirred(subject: Subject, split: str) -> Environment:
    """Give an environment that has drawn with another seed before."""
    environment = subject.make()
    _drawn(environment, split, subject.seed + 1)
    return environment


async def _plays(subject: Subject) -> list[Finding]:
    async with subject.enter_environment() as environment:
        tasks = await subject.count_affordable(environment, TASKS, each=8)
        found = [await _again(subject, environment, each) for each in await scripts(subject, environment, tasks=tasks)]
    return [finding for finding in found if finding]


async def _again(subject: Subject, environment: Environment, script: Script) -> Finding | None:
    once, again = [await Performance(script, environment).play_all() for _ in range(2)]
    async with subject.enter_environment() as other:
        anew = await Performance(script, other).play_all()
    for where, second in (("again", again), ("in a new environment", anew)):
        if found := difference(once, second):
            return Finding(seen=f"{script.title}, played {where}: {found}")
    return None


CHECKS = (
    Check(
        id="runtime.seed_control",
        asks="the same seed gives the same tasks, openings, answers and verdicts",
        why="a run that cannot be repeated cannot be debugged, resumed or compared",
        mend="draw everything from random.Random of the hook's `split` and `seed`, nothing from the global generators, "
        "the clock or the order of a set, and keep nothing in the module between episodes",
        run=_look,
    ),
)
