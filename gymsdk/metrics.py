"""Figures over scored rollouts: the spread of every field, pass@k, majority@k, and the same task by task."""

from __future__ import annotations

import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from statistics import fmean, median

from gymsdk.types import Item, Row

TASK_INDEX, ROLLOUT_INDEX = "_ng_task_index", "_ng_rollout_index"
"""The stamps NeMo Gym numbers tasks and their repeats with."""

MAX_SQUARABLE = 1e140
"""Below this, sums of the squares of as many values as fit in memory stay within a float's range."""

MAX_FLOAT_INTEGER = int(sys.float_info.max)
"""The largest integer that a float can hold."""


@dataclass(frozen=True, slots=True)
class ScoredRollout:
    """One scored rollout: which *repeat* of which *task* it is, what it earned, its numeric fields, its answer."""

    task: int
    repeat: int
    reward: float
    fields: Mapping[str, float] = field(default_factory=dict)
    answer: str | None = None

    def score(self, name: str) -> float | None:
        """Give the score *name*: `accuracy` is the reward, `no_answer` whether there is none, else a field."""
        if name == "accuracy":
            return float(self.reward)
        if name == "no_answer":
            return float(self.answer is None)
        found = self.fields.get(name)
        return None if found is None else float(found)


def parse_scored_rollout(row: Row, *, answer_key: str | None = None) -> ScoredRollout:
    """Give an output row as figures need it: its numbers and those of its usage, and the answer under *answer_key*."""
    usage = (row.get("response") or {}).get("usage") or {}
    fields = {
        name: value for name, value in select_numbers(row).items() if not name.startswith("_ng_") and name != "reward"
    }
    return ScoredRollout(
        task=row.get(TASK_INDEX, 0),
        repeat=row.get(ROLLOUT_INDEX, 0),
        reward=row["reward"],
        fields=fields | select_numbers(usage),
        answer=_format_answer(row.get(answer_key)) if answer_key else None,
    )


def select_numbers(values: Mapping[str, object]) -> dict[str, float]:
    """Return the entries of *values* that are numbers or truth values; an integer too large for a float is neither."""
    return {
        name: int(value) if isinstance(value, bool) else value
        for name, value in values.items()
        if isinstance(value, float) or (isinstance(value, int) and abs(value) <= MAX_FLOAT_INTEGER)
    }


def _format_answer(answer: object) -> str | None:
    return answer if answer is None or isinstance(answer, str) else json.dumps(answer, sort_keys=True)


def aggregate(
    rollouts: Iterable[ScoredRollout], *, scores: Sequence[str] = ("accuracy",), answers: bool = False
) -> dict[str, float]:
    """Give every figure over *rollouts*: `mean/<field>` and its like, `stderr/reward`, pass@k of each of *scores*.

    *answers* says that `answer` means something: then there is majority@k, and `no_answer` is a score too.
    """
    tasks = group_by_task(rollouts)
    if not tasks:
        return {}
    flat = [rollout for repeats in tasks.values() for rollout in repeats]
    figures = summarize_fields(flat) | {"stderr/reward": stderr(flat)}
    for name in sorted({*scores, "no_answer"} if answers else scores):
        figures |= _compute_pass_metrics(tasks, name) | _compute_average_metrics(tasks, name)
        if answers:
            figures |= _compute_majority_metrics(tasks, name)
    # Of rewards near the end of a float's range some figures are beyond it.
    return {name: figure for name, figure in figures.items() if math.isfinite(figure)}


def merge_metrics(figures: Mapping[str, float], own: Mapping[str, float]) -> tuple[dict[str, float], str | None]:
    """Return an environment's *own* figures without those that would replace one of the host's *figures*.

    The second value is a sentence about what was left out, `None` where nothing was.
    """
    taken = sorted(figures.keys() & own.keys())
    kept = {name: value for name, value in own.items() if name not in figures}
    if not taken:
        return kept, None
    names = ", ".join(map(repr, taken))
    return kept, f"hook 'metrics' answered {names}, which gymsdk computes itself: its figures are kept; rename yours"


def group_by_task(rollouts: Iterable[ScoredRollout]) -> dict[int, list[ScoredRollout]]:
    """Give *rollouts* by task, the repeats of each in order."""
    tasks: defaultdict[int, list[ScoredRollout]] = defaultdict(list)
    for rollout in rollouts:
        tasks[rollout.task].append(rollout)
    return {task: sorted(tasks[task], key=lambda rollout: rollout.repeat) for task in sorted(tasks)}


def summarize_fields(rollouts: Iterable[ScoredRollout]) -> dict[str, float]:
    """Give `mean/`, `max/`, `min/`, `median/` and `std/` of the reward and of every field, where it is finite."""
    columns: defaultdict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        columns["reward"].append(rollout.reward)
        for name, value in rollout.fields.items():
            columns[name].append(value)
    finite = {name: [value for value in values if math.isfinite(value)] for name, values in columns.items()}
    return {
        f"{figure}/{name}": value
        for name, values in finite.items()
        if values
        for figure, value in _summarize_values(values).items()
        if math.isfinite(value)
    }


def _summarize_values(values: Sequence[float]) -> dict[str, float]:
    return {
        "mean": mean(values),
        "max": float(max(values)),
        "min": float(min(values)),
        "median": _apply_scaled(values, median),
        "std": std(values),
    }


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean."""
    return _apply_scaled(values, fmean)


def std(values: Sequence[float]) -> float:
    """Return the sample standard deviation, 0 of a single value; infinity where it is beyond a float's range."""
    return _apply_scaled(values, _compute_sample_std)


def _compute_sample_std(values: Sequence[float]) -> float:
    if len(values) < 2:  # noqa: PLR2004  # one value has no spread
        return 0.0
    mean = fmean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _apply_scaled(values: Sequence[float], figure: Callable[[Sequence[float]], float]) -> float:
    """Return a *figure* that scales with its *values*, computed on smaller ones where their squares would overflow."""
    scale = max(map(abs, values), default=0.0)
    if scale < MAX_SQUARABLE:
        return float(figure(values))
    return figure([value / scale for value in values]) * scale


def stderr(rollouts: Iterable[ScoredRollout]) -> float:
    """Return the standard error of the mean reward, clustered by task: repeats of one task are not independent.

    Over a single task it is that of its repeats, over a single rollout 0.
    """
    tasks = group_by_task(rollouts)
    rewards = [rollout.reward for repeats in tasks.values() for rollout in repeats]
    owners = [task for task, repeats in tasks.items() for _ in repeats]

    def figure(scaled: Sequence[float]) -> float:
        clusters: defaultdict[int, list[float]] = defaultdict(list)
        for task, reward in zip(owners, scaled, strict=True):
            clusters[task].append(reward)
        return _compute_clustered_stderr(list(clusters.values()))

    return _apply_scaled(rewards, figure)


def _compute_clustered_stderr(rewards: Sequence[Sequence[float]]) -> float:
    if len(rewards) < 2:  # noqa: PLR2004  # one task says nothing of how tasks differ
        return sum(_compute_sample_std(repeats) / math.sqrt(len(repeats)) for repeats in rewards)
    total = sum(map(len, rewards))
    mean = math.fsum(map(math.fsum, rewards)) / total
    off = math.fsum((math.fsum(repeats) - mean * len(repeats)) ** 2 for repeats in rewards)
    return math.sqrt(off * len(rewards) / (len(rewards) - 1)) / total


def summarize_tasks(
    rollouts: Iterable[ScoredRollout],
    *,
    expected: int | Mapping[int, int] | None = None,
    samples: Mapping[int, Row] | None = None,
) -> list[Item]:
    """Return one entry per task: the spread of its fields, its rollouts, and how many are missing.

    Args:
        rollouts: The scored rollouts.
        expected: The number of rollouts of every task, or of each task by its number.
        samples: The tasks' rows, by task.
    """
    known = expected if isinstance(expected, Mapping) else {}
    each = expected if isinstance(expected, int) else 0
    return [
        _summarize_task(task, found, known.get(task, each) or len(found), (samples or {}).get(task))
        for task, found in group_by_task(rollouts).items()
    ]


def _summarize_task(task: int, found: Sequence[ScoredRollout], expected: int, sample: Row | None) -> Item:
    missing = max(expected - len(found), 0)
    entry: Item = {
        TASK_INDEX: task,
        "num_rollouts": len(found),
        "expected_num_rollouts": expected,
        "missing_num_rollouts": missing,
        "reward_profile_completion_pct": 100 * (expected - missing) / expected,
        "rollout_infos": [_build_rollout_info(rollout) for rollout in found],
    }
    if sample is not None:
        entry["sample"] = {key: value for key, value in sample.items() if key not in {TASK_INDEX, ROLLOUT_INDEX}}
    return entry | summarize_fields(found)


def _build_rollout_info(rollout: ScoredRollout) -> Item:
    name = f"{rollout.task}:{rollout.repeat}"
    which = {"rollout_id": name, TASK_INDEX: rollout.task, ROLLOUT_INDEX: rollout.repeat}
    return which | {"reward": rollout.reward} | dict(rollout.fields)


def compute_pass_curve(values: Sequence[float]) -> list[float]:
    """Give one task's pass@k for k = 1, 2, … from the scores of its rollouts.

    Right-or-wrong scores give the chance that k rollouts drawn from all hold a right one, others the best of the
    first k.
    """
    if any(value not in {0.0, 1.0} for value in values):
        return list(accumulate(values, max))
    total, wrong = len(values), sum(not value for value in values)
    # C(wrong, k) / C(total, k) grows by one factor from k to k + 1: no large binomials.
    return [1.0 - missed for missed in accumulate(((wrong - k) / (total - k) for k in range(total)), mul)]


def compute_average_curve(values: Iterable[float]) -> list[float]:
    """Give the mean of the first k of *values*, for each k."""
    return [total / k for k, total in enumerate(accumulate(values), 1)]


def compute_majority_curve(votes: Iterable[tuple[str | None, float]]) -> list[float]:
    """Give the score of the most frequent vote among the first k, for each k; ties are averaged.

    A vote is an answer with its score; one without an answer does not count, and no answer at all scores 0.
    """
    counts: defaultdict[tuple[str, float], int] = defaultdict(int)
    most, tied, score = 0, 0, 0.0
    curve = []
    for answer, value in votes:
        if answer is not None:
            counts[answer, value] = count = counts[answer, value] + 1
            if count > most:
                most, tied, score = count, 1, value
            elif count == most:
                tied, score = tied + 1, score + value
        curve.append(score / tied if tied else 0.0)
    return curve


def average_by_run(tasks: Mapping[int, Sequence[ScoredRollout]], name: str) -> list[float]:
    """Give the mean score of every task's first rollout, of every task's second, and so on, in percent."""
    return [100 * mean for mean in _average_available(_iter_task_scores(tasks, name))]


def _iter_task_scores(tasks: Mapping[int, Sequence[ScoredRollout]], name: str) -> Iterator[list[float]]:
    for repeats in tasks.values():
        found = [value for rollout in repeats if (value := rollout.score(name)) is not None]
        if found:
            yield found


def _compute_pass_metrics(tasks: Mapping[int, Sequence[ScoredRollout]], name: str) -> dict[str, float]:
    means = _average_available(map(compute_pass_curve, _iter_task_scores(tasks, name)))
    return {f"pass@{k}/{name}": 100 * mean for k, mean in enumerate(means, 1)}


def _compute_average_metrics(tasks: Mapping[int, Sequence[ScoredRollout]], name: str) -> dict[str, float]:
    means = _average_extended(map(compute_average_curve, _iter_task_scores(tasks, name)))
    figures: dict[str, float] = {}
    for k, (mean, across) in enumerate(zip(means, _iter_std_curve(average_by_run(tasks, name)), strict=True), 1):
        figures[f"pass@1[avg-of-{k}]/{name}"] = 100 * mean
        if k > 1:
            figures[f"pass@1[avg-of-{k}]/{name}/std_dev_across_runs"] = across
            figures[f"pass@1[avg-of-{k}]/{name}/std_err_across_runs"] = across / math.sqrt(k)
    return figures


def _compute_majority_metrics(tasks: Mapping[int, Sequence[ScoredRollout]], name: str) -> dict[str, float]:
    votes = (
        [(rollout.answer, value) for rollout in repeats if (value := rollout.score(name)) is not None]
        for repeats in tasks.values()
    )
    means = _average_extended(compute_majority_curve(each) for each in votes if each)
    return {f"majority@{k}/{name}": 100 * mean for k, mean in enumerate(means, 1)}


def _iter_std_curve(values: Iterable[float]) -> Iterator[float]:
    mean = off = 0.0
    for k, value in enumerate(values, 1):
        before = value - mean
        mean += before / k
        off += before * (value - mean)
        variance = off / (k - 1) if k > 1 else 0.0
        # Beyond a float's range it is infinite, or not a number.
        yield math.sqrt(variance) if variance >= 0 else math.nan


def _average_available(curves: Iterable[Sequence[float]]) -> list[float]:
    """Average the tasks' curves at each k, over the tasks with as many rollouts."""
    columns: list[list[float]] = []
    for curve in curves:
        columns.extend([] for _ in range(len(columns), len(curve)))
        for column, value in zip(columns, curve, strict=False):
            column.append(value)
    return list(map(mean, columns))


def _average_extended(curves: Iterable[Sequence[float]]) -> list[float]:
    """Average the tasks' curves at each k; one that ends before keeps its last value."""
    found = list(curves)
    longest = max(map(len, found), default=0)
    columns: list[list[float]] = [[] for _ in range(longest)]
    ended = [0.0] * (longest + 1)
    for curve in found:
        for column, value in zip(columns, curve, strict=False):
            column.append(value)
        ended[len(curve)] += curve[-1]
    kept = accumulate(ended)
    return [
        _apply_scaled([*column, rest], lambda values: math.fsum(values) / len(found))
        for column, rest in zip(columns, kept, strict=False)
    ]
