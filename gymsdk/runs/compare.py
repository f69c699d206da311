"""Compare two runs task by task: the mean difference of the rewards with its confidence interval, and flipped tasks.

Tasks are paired by their rows, not by their numbers, so that runs with other seeds, limits or orders can be compared as
far as they share tasks. The interval is a percentile bootstrap over tasks, because the rollouts of one task are not
independent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from statistics import fmean

from pydantic import BaseModel, ConfigDict

from gymsdk.runs.groups import list_task_values
from gymsdk.runs.index import RunIndex
from gymsdk.runs.queries import RunQueries
from gymsdk.types import Row

FEW_TASKS = 30
"""Below this number of common tasks, the interval is too narrow to be trusted."""

SOLVED = 0.5
"""The mean reward from which a task counts as solved."""

DRAWS, MANY_TASKS, DRAWS_OF_MANY = 10_000, 2000, 2000
"""The number of bootstrap samples; above `MANY_TASKS` tasks fewer suffice."""

CHUNK_VALUES = 4_000_000
"""The number of indices that the bootstrap draws at once."""

COMPARED_SETTINGS = ("budget", "sampling", "environments")
"""The settings of `run.json` that can explain a difference of the rewards."""


class TaskPair(BaseModel):
    """A task that both runs have.

    Attributes:
        environment: The environment.
        prompt: The beginning of its prompt.
        task_a: The index of the task in the first run.
        task_b: The index of the task in the second run.
        a: The mean reward in the first run.
        b: The mean reward in the second run.
        rollouts_a: The number of scored rollouts in the first run.
        rollouts_b: The number of scored rollouts in the second run.
        shown_a: The rollout of the first run that shows the difference best, such as `3:0`: the one with the highest
            reward if the first run is better, else the one with the lowest.
        shown_b: The rollout of the second run, chosen the other way.
    """

    model_config = ConfigDict(frozen=True)

    environment: str
    prompt: str
    task_a: int
    task_b: int
    a: float
    b: float
    rollouts_a: int
    rollouts_b: int
    shown_a: str
    shown_b: str

    @property
    def difference(self) -> float:
        """How much higher the mean reward of the second run is."""
        return self.b - self.a

    @property
    def flip(self) -> int:
        """1 if only the second run solves the task, -1 if only the first run does, else 0."""
        return (self.b >= SOLVED) - (self.a >= SOLVED)


class Difference(BaseModel):
    """The difference of two runs in one environment, or in all of them.

    Attributes:
        environment: The environment; empty for all.
        tasks: The number of common tasks with a reward in both runs.
        a: The mean over the tasks of their mean rewards in the first run.
        b: The same in the second run.
        difference: *b* minus *a*.
        low: The lower end of the 95 % interval of the difference; `None` for fewer than two tasks.
        high: The upper end.
        better: The number of tasks with a higher mean reward in the second run.
        worse: The number of tasks with a lower one.
        flips_up: The number of tasks that only the second run solves.
        flips_down: The number of tasks that only the first run solves.
    """

    model_config = ConfigDict(frozen=True)

    environment: str
    tasks: int
    a: float
    b: float
    difference: float
    low: float | None
    high: float | None
    better: int
    worse: int
    flips_up: int
    flips_down: int

    @property
    def is_significant(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


class Comparison(BaseModel):
    """The comparison of two runs.

    Attributes:
        a: The name of the first run.
        b: The name of the second run.
        overall: The difference over all common tasks; `None` if there are none.
        environments: The difference in each environment, if there are several.
        pairs: The common tasks, the largest loss first.
        only_a: The number of tasks that only the first run has, or that have a reward only there.
        only_b: The same for the second run.
        warnings: What makes the result less trustworthy.
        groups: The difference of the tasks with each value of the field by which they are grouped.
    """

    model_config = ConfigDict(frozen=True)

    a: str
    b: str
    overall: Difference | None
    environments: list[Difference]
    pairs: list[TaskPair]
    only_a: int
    only_b: int
    warnings: list[str]
    groups: dict[str, Difference] = {}


def compare(first: RunIndex, second: RunIndex, *, seed: int = 0, by: str | None = None) -> Comparison:
    """Compare two runs; a positive difference means that *second* is better.

    Args:
        first: The index of the first run, up to date.
        second: The index of the second run, up to date.
        seed: The seed of the bootstrap.
        by: A field of the rows or an annotation of the first run, by which the tasks are grouped.

    Raises:
        UsageError: The first run has no such field.
    """
    tasks_a, tasks_b = _read_tasks_of_both(first, second)
    # By what the tasks contain: two runs may number the same tasks differently.
    common = [digest for digest in tasks_a if digest in tasks_b and tasks_a[digest].rewards and tasks_b[digest].rewards]
    pairs = sorted((_pair(tasks_a[digest], tasks_b[digest]) for digest in common), key=lambda pair: pair.difference)
    by_environment: defaultdict[str, list[TaskPair]] = defaultdict(list)
    for pair in pairs:
        by_environment[pair.environment].append(pair)
    names = sorted(by_environment) if len(by_environment) > 1 else []
    comparison = Comparison(
        a=first.source.name,
        b=second.source.name,
        overall=measure(pairs, seed=seed) if pairs else None,
        environments=[measure(by_environment[name], environment=name, seed=seed) for name in names],
        pairs=pairs,
        only_a=len(tasks_a) - len(pairs),
        only_b=len(tasks_b) - len(pairs),
        warnings=[],
        groups={value: measure(found, seed=seed) for value, found in _group_pairs(pairs, first, by).items()},
    )
    return comparison.model_copy(update={"warnings": list(_list_warnings(comparison, first, second))})


def measure(pairs: Sequence[TaskPair], *, environment: str = "", seed: int = 0) -> Difference:
    """Return the mean difference over *pairs*, at least one, with its interval."""
    differences = [pair.difference for pair in pairs]
    low, high = bootstrap(differences, seed=seed) if len(pairs) > 1 else (None, None)
    return Difference(
        environment=environment,
        tasks=len(pairs),
        a=fmean(pair.a for pair in pairs),
        b=fmean(pair.b for pair in pairs),
        difference=fmean(differences),
        low=low,
        high=high,
        better=sum(difference > 0 for difference in differences),
        worse=sum(difference < 0 for difference in differences),
        flips_up=sum(pair.flip > 0 for pair in pairs),
        flips_down=sum(pair.flip < 0 for pair in pairs),
    )


def bootstrap(values: Sequence[float], *, seed: int = 0) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval of the mean of *values*."""
    import numpy as np

    data = np.asarray(values, dtype=np.float64)
    draws = DRAWS if len(data) <= MANY_TASKS else DRAWS_OF_MANY
    rng = np.random.default_rng(seed)
    rows = max(1, CHUNK_VALUES // len(data))
    means = [
        data[rng.integers(len(data), size=(min(rows, draws - start), len(data)))].mean(axis=1)
        for start in range(0, draws, rows)
    ]
    low, high = np.percentile(np.concatenate(means), (2.5, 97.5))
    return float(low), float(high)


def _group_pairs(pairs: Sequence[TaskPair], index: RunIndex, by: str | None) -> dict[str, list[TaskPair]]:
    """Return the pairs by the values of a field, in the order of the values; a task may have several."""
    if by is None:
        return {}
    with closing(index.connect()) as connection:
        values = list_task_values(connection, by)
    found: defaultdict[str, list[TaskPair]] = defaultdict(list)
    for pair in pairs:
        for value in values.get((pair.environment, pair.task_a), ["none"]):
            found[value].append(pair)
    return dict(sorted(found.items()))


class _Task(BaseModel):
    environment: str
    task: int
    prompt: str
    rewards: list[float]
    names: list[str]

    def choose(self, *, highest: bool) -> str:
        """Return the name of a rollout with the highest or the lowest reward."""
        place = self.rewards.index(max(self.rewards) if highest else min(self.rewards))
        return self.names[place]


def _read_tasks_of_both(*runs: RunIndex) -> Iterator[dict[str, _Task]]:
    """Yield the tasks of each run by what identifies them: the row as sent, or the line if a run does not say it."""
    for index in runs:
        index.update_tasks()
    column = "digest" if all(map(_has_all_digests, runs)) else "line_digest"
    for index in runs:
        if column == "line_digest":
            index.update_line_digests()
        yield _read_tasks(index, column)


def _has_all_digests(index: RunIndex) -> bool:
    with closing(index.connect()) as connection:
        return connection.execute("SELECT 1 FROM task WHERE digest IS NULL").fetchone() is None


def _read_tasks(index: RunIndex, column: str) -> dict[str, _Task]:
    """Return each task of a run with its rewards, by its digest in *column*; equal digests are the same task."""
    tasks: dict[str, _Task] = {}
    with closing(index.connect()) as connection:
        for digest, environment, task, repeat, prompt, reward in connection.execute(
            f"SELECT t.{column}, r.environment, r.task, r.repeat, r.prompt, r.reward FROM rollout r"  # noqa: S608  # a constant
            " JOIN task t ON t.environment = r.environment AND t.task = r.task ORDER BY r.task, r.repeat"
        ):
            entry = tasks.get(digest)
            if entry is None:
                entry = tasks[digest] = _Task(environment=environment, task=task, prompt=prompt, rewards=[], names=[])
            if reward is not None:
                entry.rewards.append(reward)
                entry.names.append(f"{task}:{repeat}")
    return tasks


def _pair(a: _Task, b: _Task) -> TaskPair:
    mean_a, mean_b = fmean(a.rewards), fmean(b.rewards)
    return TaskPair(
        environment=a.environment,
        prompt=a.prompt,
        task_a=a.task,
        task_b=b.task,
        a=mean_a,
        b=mean_b,
        rollouts_a=len(a.rewards),
        rollouts_b=len(b.rewards),
        shown_a=a.choose(highest=mean_a > mean_b),
        shown_b=b.choose(highest=mean_a <= mean_b),
    )


def _list_warnings(comparison: Comparison, first: RunIndex, second: RunIndex) -> Iterator[str]:
    for index in (first, second):
        with closing(RunQueries(index)) as queries:
            yield from (f"{index.source.name}: {problem}" for problem in queries.list_problems())
    if comparison.overall is None:
        yield "the runs have no task in common"
        return
    if comparison.overall.tasks < FEW_TASKS:
        yield f"{comparison.overall.tasks} common tasks are few; the interval needs {FEW_TASKS} or more"
    for name, count in ((comparison.a, comparison.only_a), (comparison.b, comparison.only_b)):
        if count:
            yield f"{count} tasks of {name} are left out: the other run does not have them, or they have no reward"
    settings = [index.source.read_about().get("settings") or {} for index in (first, second)]
    different = [name for name in COMPARED_SETTINGS if all(settings) and settings[0].get(name) != settings[1].get(name)]
    if different:
        yield f"the runs have different settings: {', '.join(different)}"


def list_worst(comparison: Comparison, count: int) -> list[TaskPair]:
    """Return the at most *count* tasks that the second run loses, those with the largest losses first."""
    return [pair for pair in comparison.pairs if pair.difference < 0][:count]


def list_best(comparison: Comparison, count: int) -> list[TaskPair]:
    """Return the at most *count* tasks that the second run wins, those with the largest gains first."""
    return [pair for pair in reversed(comparison.pairs) if pair.difference > 0][:count]


def to_json(comparison: Comparison) -> Row:
    """Return the comparison as a JSON object, with the difference of each task."""
    content: Row = comparison.model_dump(mode="json")
    for entry, pair in zip(content["pairs"], comparison.pairs, strict=True):
        entry |= {"difference": pair.difference, "flip": pair.flip}
    return content
