"""Determinism: with the same seed an environment gives the same, twice, anew, and in another interpreter."""

from __future__ import annotations

from itertools import islice

from gymsdk.checks import elsewhere
from gymsdk.checks.check import Check, Finding, NotApplicable
from gymsdk.checks.loading import numbers
from gymsdk.checks.performance import Performance, difference, plain, scripts
from gymsdk.checks.subject import Subject
from gymsdk.environment import Environment
from gymsdk.types import Row

ROWS = 6
"""Tasks of a split that are compared."""

TASKS = 3
"""Tasks that are played."""

SEEDS = 24
"""Seeds whose first tasks are compared with the first so many tasks of one seed."""


async def _look(subject: Subject) -> list[Finding]:
    rows = [found for split in _splits(subject) for found in [*await _rows(subject, split), *_alike(subject, split)]]
    return rows + await _plays(subject)


def _splits(subject: Subject) -> tuple[str, ...]:
    return () if subject.given is not None else subject.environment.splits


async def _rows(subject: Subject, split: str) -> list[Finding]:
    first = _drawn(subject.make(), split, subject.seed)
    about = f"split {split!r} with seed {subject.seed}, drawn"
    for where, again in (("a second time", subject.make()), ("after another seed", _stirred(subject, split))):
        if found := difference(first, _drawn(again, split, subject.seed), "row"):
            return [Finding(seen=f"{about} {where}: {found}")]
    found = await _elsewhere(subject, split, first)
    mend = "sort sets before drawing from them, and seed with a string or a number, never with hash()"
    return [Finding(seen=f"{about} in another interpreter: {found}", mend=mend)] if found else []


def _alike(subject: Subject, split: str) -> list[Finding]:
    """Find what never varies in the first task of a seed, though it varies from task to task."""
    environment = subject.make()
    row = [task.row() for task in islice(environment.tasks(split, seed=subject.seed), SEEDS)]
    first = [task.row() for seed in range(SEEDS) for task in islice(environment.tasks(split, seed=seed), 1)]
    if len(first) < SEEDS or all(each == first[0] for each in first):
        # There are not so many, or the split does not depend on the seed.
        return []
    mend = "where kinds of tasks follow each other in turn, let the seed choose which comes first"
    return [
        Finding(
            seen=f"split {split!r}: {key!r} is {_values(first, key)[0]!r} in the first task of every seed", mend=mend
        )
        for key in row[0]
        if not numbers(key) and 1 < len(_values(row, key)) <= SEEDS // 2 and len(_values(first, key)) == 1
    ]


def _values(rows: list[Row], key: str) -> list[str | int | bool]:
    """Give the values of a row's field without repeats, of those that a kind of task may be told by."""
    return list(dict.fromkeys(row[key] for row in rows if isinstance(row.get(key), (str, int, bool))))


async def _elsewhere(subject: Subject, split: str, first: list[object]) -> str | None:
    try:
        rows = await elsewhere.rows(subject, split, seed=subject.seed, count=ROWS)
    except NotApplicable:
        return None
    return difference(first, rows, "row")


def _drawn(environment: Environment, split: str, seed: int) -> list[object]:
    return [plain(task.row()) for task in islice(environment.tasks(split, seed=seed), ROWS)]


def _stirred(subject: Subject, split: str) -> Environment:
    """Give an environment that has drawn with another seed before."""
    environment = subject.make()
    _drawn(environment, split, subject.seed + 1)
    return environment


async def _plays(subject: Subject) -> list[Finding]:
    findings = []
    async with subject.fresh() as environment:
        for script in await scripts(subject, environment, tasks=TASKS):
            first = await Performance(script, environment, subject.budget).whole()
            again = await Performance(script, environment, subject.budget).whole()
            async with subject.fresh() as other:
                anew = await Performance(script, other, subject.budget).whole()
            for where, second in (("again", again), ("in a new environment", anew)):
                if found := difference(first, second):
                    findings.append(Finding(seen=f"{script.title}, played {where}: {found}"))
                    break
    return findings


CHECKS = (
    Check(
        id="runtime.seed_control",
        asks="the same seed gives the same tasks, openings, answers and verdicts",
        why="a run that cannot be repeated cannot be debugged, resumed or compared",
        mend="draw everything from random.Random of the hook's `split` and `seed`, nothing from the global generators, "
        "the clock or the order of a set",
        look=_look,
    ),
)
