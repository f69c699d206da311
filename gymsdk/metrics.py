"""Metrics over scored rollouts: statistics of every field, pass@k, majority@k, vote@k, and the same per task."""

from __future__ import annotations

import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate
from operator import mul
from statistics import fmean, median

from gymsdk.line import ROLLOUT_INDEX, TASK_INDEX, StoredRollout, get_object
from gymsdk.types import Item, Row

ANSWER = "extracted_answer"
"""The field of a verdict on which majority@k and vote@k vote, if an environment has it."""

MAX_SQUARABLE = 1e140
"""Sums of squares of values below this stay within the range of a float, for as many values as fit in memory."""

MAX_FLOAT_INTEGER = int(sys.float_info.max)
"""The largest integer within the range of a float."""


@dataclass(frozen=True, slots=True)
class ScoredRollout:
    """One scored rollout, as far as metrics need it.

    Attributes:
        task: The number of its task.
        repeat: Its number among the rollouts of the task.
        reward: Its reward.
        fields: Its numeric fields.
        answer: Its answer for votes; `None` if it has none.
    """

    task: int
    repeat: int
    reward: float
    fields: Mapping[str, float] = field(default_factory=dict)
    answer: str | None = None

    def score(self, name: str) -> float | None:
        """Return the score *name*: `accuracy` is the reward, `no_answer` is 1 without an answer, else a field."""
        if name == "accuracy":
            return float(self.reward)
        if name == "no_answer":
            return float(self.answer is None)
        value = self.fields.get(name)
        return None if value is None else float(value)


def parse_scored_rollout(stored: StoredRollout) -> ScoredRollout:
    """Return the numbers of the verdict of a stored rollout with a reward, of its components and its token usage.

    The numbers of the row are no metrics if the line lists the fields of the verdict.
    """
    names = stored.verdict_names
    own = {
        name: value
        for name, value in stored.line.items()
        if (names is None or name in names) and name != "reward" and not name.startswith("_ng_")
    }
    parts = {f"reward_components/{name}": value for name, value in stored.components.items()}
    answer = own.get(ANSWER)
    return ScoredRollout(
        task=stored.task,
        repeat=stored.repeat,
        reward=float(stored.line["reward"]),
        fields=select_numbers(own | parts | get_object(stored.response, "usage")),
        answer=answer if answer is None or isinstance(answer, str) else json.dumps(answer, sort_keys=True),
    )


def select_numbers(values: Mapping[str, object]) -> dict[str, float]:
    """Return the entries that are numbers or Booleans, without integers beyond the range of a float."""
    return {
        name: int(value) if isinstance(value, bool) else value
        for name, value in values.items()
        if isinstance(value, float) or (isinstance(value, int) and abs(value) <= MAX_FLOAT_INTEGER)
    }


def aggregate(
    rollouts: Iterable[ScoredRollout], *, scores: Sequence[str] = ("accuracy",), answers: bool = False
) -> dict[str, float]:
    """Return all metrics over *rollouts*.

    Args:
        rollouts: The scored rollouts.
        scores: The scores for which pass@k and averages are computed.
        answers: Whether the rollouts have answers; if so, majority@k, vote@k and the score `no_answer` are
            included.

    Returns:
        `mean/<field>` and the other statistics of every field, `stderr/reward`, and pass@k of each score, in percent.
        Metrics beyond the range of a float are left out.
    """
    tasks = group_by_task(rollouts)
    if not tasks:
        return {}
    flat = [rollout for repeats in tasks.values() for rollout in repeats]
    metrics = summarize_fields(flat) | {"stderr/reward": stderr(flat)}
    for name in sorted({*scores, "no_answer"} if answers else scores):
        means = _average_available(map(compute_pass_curve, _iter_task_scores(tasks, name)))
        metrics |= {f"pass@{k}/{name}": 100 * mean for k, mean in enumerate(means, 1)}
        metrics |= _compute_average_metrics(tasks, name)
        if answers:
            metrics |= _compute_vote_metrics(tasks, name)
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def merge_metrics(host: Mapping[str, float], own: Mapping[str, float]) -> tuple[dict[str, float], str | None]:
    """Return an environment's *own* metrics without those whose names are among the *host*'s.

    Returns:
        The metrics, and a message about those left out, `None` if there are none.
    """
    conflicts = sorted(host.keys() & own.keys())
    remaining = {name: value for name, value in own.items() if name not in host}
    if not conflicts:
        return remaining, None
    names = ", ".join(map(repr, conflicts))
    return (
        remaining,
        f"hook 'metrics' returned {names}, which gymsdk computes itself; gymsdk's values are kept, rename yours",
    )


def group_by_task(rollouts: Iterable[ScoredRollout]) -> dict[int, list[ScoredRollout]]:
    """Return *rollouts* by task, ordered by task and repeat."""
    tasks: defaultdict[int, list[ScoredRollout]] = defaultdict(list)
    for rollout in rollouts:
        tasks[rollout.task].append(rollout)
    return {task: sorted(tasks[task], key=lambda rollout: rollout.repeat) for task in sorted(tasks)}


# Statistics of fields


def summarize_fields(rollouts: Iterable[ScoredRollout]) -> dict[str, float]:
    """Return `mean/`, `max/`, `min/`, `median/` and `std/` of the reward and of every field, over finite values."""
    columns: defaultdict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        columns["reward"].append(rollout.reward)
        for name, value in rollout.fields.items():
            columns[name].append(value)
    finite = {name: [value for value in values if math.isfinite(value)] for name, values in columns.items()}
    return {
        f"{statistic}/{name}": value
        for name, values in finite.items()
        if values
        for statistic, value in _summarize_values(values).items()
        if math.isfinite(value)
    }


def _summarize_values(values: Sequence[float]) -> dict[str, float]:
    if len(values) == 1:
        # Most tasks of a run without repeats have one value per field.
        value = float(values[0])
        return {"mean": value, "max": value, "min": value, "median": value, "std": 0.0}
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
    """Return the sample standard deviation: 0 for a single value, infinity beyond the range of a float."""
    return _apply_scaled(values, _compute_sample_std)


def stderr(rollouts: Iterable[ScoredRollout]) -> float:
    """Return the standard error of the mean reward, clustered by task.

    Rollouts of one task are not independent. For a single task the result is the standard error of its rollouts, for a
    single rollout 0.
    """
    tasks = group_by_task(rollouts)
    rewards = [rollout.reward for repeats in tasks.values() for rollout in repeats]
    owners = [task for task, repeats in tasks.items() for _ in repeats]

    def compute(scaled: Sequence[float]) -> float:
        clusters: defaultdict[int, list[float]] = defaultdict(list)
        for task, reward in zip(owners, scaled, strict=True):
            clusters[task].append(reward)
        return _compute_clustered_stderr(list(clusters.values()))

    return _apply_scaled(rewards, compute)


def _compute_sample_std(values: Sequence[float]) -> float:
    if len(values) < 2:  # noqa: PLR2004 - a single value has no deviation
        return 0.0
    mean = fmean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _compute_clustered_stderr(rewards: Sequence[Sequence[float]]) -> float:
    if len(rewards) < 2:  # noqa: PLR2004 - a single task says nothing about the variance between tasks
        return sum(_compute_sample_std(repeats) / math.sqrt(len(repeats)) for repeats in rewards)
    count = sum(map(len, rewards))
    mean = math.fsum(map(math.fsum, rewards)) / count
    squares = math.fsum((math.fsum(repeats) - mean * len(repeats)) ** 2 for repeats in rewards)
    return math.sqrt(squares * len(rewards) / (len(rewards) - 1)) / count


def _apply_scaled(values: Sequence[float], statistic: Callable[[Sequence[float]], float]) -> float:
    """Return a *statistic* that is proportional to its values; scaling keeps squares of large values finite."""
    scale = max(map(abs, values), default=0.0)
    if scale < MAX_SQUARABLE:
        return float(statistic(values))
    return statistic([value / scale for value in values]) * scale


# Histograms


def compute_bin_edges(low: float, high: float, bins: int) -> list[float]:
    """Return the `bins + 1` edges of *bins* bins of equal width from *low* to *high*.

    The lower edge belongs to a bin. Each edge is the float next to the exact edge between the decimal numbers *low* and
    *high*, as 0.15 is the float next to 3/20. A product such as `3 * 0.05` is larger than 0.15.
    """
    first, last = to_fraction(low), to_fraction(high)
    return [float(first + (last - first) * number / bins) for number in range(bins + 1)]


def to_fraction(value: float) -> Fraction:
    """Return the decimal number that a finite *value* stands for, such as 1/10 for 0.1."""
    return Fraction(repr(float(value)))


# Entries per task


def summarize_tasks(
    rollouts: Iterable[ScoredRollout],
    *,
    expected: int | Mapping[int, int] | None = None,
    samples: Mapping[int, Row] | None = None,
) -> list[Item]:
    """Return the entries of `iter_task_summaries`."""
    return list(iter_task_summaries(rollouts, expected=expected, samples=samples))


def iter_task_summaries(
    rollouts: Iterable[ScoredRollout],
    *,
    expected: int | Mapping[int, int] | None = None,
    samples: Mapping[int, Row] | None = None,
) -> Iterator[Item]:
    """Yield one entry per task: statistics of its fields, its rollouts, and the number of missing rollouts.

    Args:
        rollouts: The scored rollouts.
        expected: The number of rollouts of every task, or of each task by its number.
        samples: The tasks' rows by task number. Each is looked up when its entry is computed.
    """
    expected_by_task = expected if isinstance(expected, Mapping) else {}
    default = expected if isinstance(expected, int) else 0
    for task, repeats in group_by_task(rollouts).items():
        count = expected_by_task.get(task, default) or len(repeats)
        yield _summarize_task(task, repeats, count, (samples or {}).get(task))


def _summarize_task(task: int, repeats: Sequence[ScoredRollout], expected: int, sample: Row | None) -> Item:
    missing = max(expected - len(repeats), 0)
    entry: Item = {
        TASK_INDEX: task,
        "num_rollouts": len(repeats),
        "expected_num_rollouts": expected,
        "missing_num_rollouts": missing,
        "reward_profile_completion_pct": 100 * (expected - missing) / expected,
        "rollout_infos": [_build_rollout_info(rollout) for rollout in repeats],
    }
    if sample is not None:
        left_out = {TASK_INDEX, ROLLOUT_INDEX, "responses_create_params"}
        entry["sample"] = {key: value for key, value in sample.items() if key not in left_out}
    return entry | summarize_fields(repeats)


def _build_rollout_info(rollout: ScoredRollout) -> Item:
    rollout_id = f"{rollout.task}:{rollout.repeat}"
    ids = {"rollout_id": rollout_id, TASK_INDEX: rollout.task, ROLLOUT_INDEX: rollout.repeat}
    return ids | {"reward": rollout.reward} | dict(rollout.fields)


# Curves over k


def compute_pass_curve(values: Sequence[float]) -> list[float]:
    """Return one task's pass@k for k = 1, 2, … from the scores of its rollouts.

    For scores of 0 and 1 it is the probability that k rollouts drawn from all include a correct one (the unbiased
    estimator of https://arxiv.org/abs/2107.03374). For other scores it is the best of the first k.
    """
    if any(value not in {0.0, 1.0} for value in values):
        return list(accumulate(values, max))
    total, wrong = len(values), sum(not value for value in values)
    # C(wrong, k) / C(total, k) gains one factor from k to k + 1, which avoids large binomials.
    return [1.0 - missed for missed in accumulate(((wrong - k) / (total - k) for k in range(total)), mul)]


def compute_average_curve(values: Iterable[float]) -> list[float]:
    """Return the mean of the first k of *values* for each k."""
    return [total / k for k, total in enumerate(accumulate(values), 1)]


def compute_majority_curve(votes: Iterable[tuple[str | None, float]]) -> list[float]:
    """Return the score of the most frequent pair of an answer and a score among the first k, for each k.

    NeMo Gym defines it so: if rollouts with equal answers have different scores, their votes are split. See
    `compute_vote_curve` for the most frequent answer. The scores of equally frequent pairs are averaged.

    Args:
        votes: Pairs of an answer and its score. A vote without an answer does not count; without any answer the score
            is 0.
    """
    counts: defaultdict[tuple[str, float], int] = defaultdict(int)
    highest, tied, score = 0, 0, 0.0
    curve = []
    for answer, value in votes:
        if answer is not None:
            counts[answer, value] = count = counts[answer, value] + 1
            if count > highest:
                highest, tied, score = count, 1, value
            elif count == highest:
                tied, score = tied + 1, score + value
        curve.append(score / tied if tied else 0.0)
    return curve


def compute_vote_curve(votes: Iterable[tuple[str | None, float]]) -> list[float]:
    """Return the score of the most frequent answer among the first k rollouts, for each k.

    The score of an answer is the mean score of the rollouts that gave it. The scores of equally frequent answers are
    averaged.

    Args:
        votes: Pairs of an answer and its score. A vote without an answer does not count; without any answer the score
            is 0.
    """
    counts: defaultdict[str, int] = defaultdict(int)
    totals: defaultdict[str, float] = defaultdict(float)
    highest, tied, total = 0, 0, 0.0
    curve = []
    for answer, value in votes:
        if answer is not None:
            counts[answer] = count = counts[answer] + 1
            totals[answer] += value
            if count > highest:
                highest, tied, total = count, 1, totals[answer]
            elif count == highest:
                tied, total = tied + 1, total + totals[answer]
        # Tied answers have equally many votes, so that the mean of their means is the mean of all their scores.
        curve.append(total / (tied * highest) if tied else 0.0)
    return curve


def average_by_run(tasks: Mapping[int, Sequence[ScoredRollout]], name: str) -> list[float]:
    """Return the mean score of all tasks' first rollouts, of their second rollouts, and so on, in percent."""
    return [100 * mean for mean in _average_available(_iter_task_scores(tasks, name))]


def _compute_average_metrics(tasks: Mapping[int, Sequence[ScoredRollout]], name: str) -> dict[str, float]:
    means = _average_extended(map(compute_average_curve, _iter_task_scores(tasks, name)))
    deviations = _iter_std_curve(average_by_run(tasks, name))
    metrics: dict[str, float] = {}
    for k, (mean, deviation) in enumerate(zip(means, deviations, strict=True), 1):
        metrics[f"pass@1[avg-of-{k}]/{name}"] = 100 * mean
        if k > 1:
            metrics[f"pass@1[avg-of-{k}]/{name}/std_dev_across_runs"] = deviation
            metrics[f"pass@1[avg-of-{k}]/{name}/std_err_across_runs"] = deviation / math.sqrt(k)
    return metrics


def _compute_vote_metrics(tasks: Mapping[int, Sequence[ScoredRollout]], name: str) -> dict[str, float]:
    votes = [
        found
        for repeats in tasks.values()
        if (found := [(rollout.answer, value) for rollout in repeats if (value := rollout.score(name)) is not None])
    ]
    return {
        f"{metric}@{k}/{name}": 100 * mean
        for metric, compute in (("majority", compute_majority_curve), ("vote", compute_vote_curve))
        for k, mean in enumerate(_average_extended(map(compute, votes)), 1)
    }


def _iter_task_scores(tasks: Mapping[int, Sequence[ScoredRollout]], name: str) -> Iterator[list[float]]:
    for repeats in tasks.values():
        scores = [value for rollout in repeats if (value := rollout.score(name)) is not None]
        if scores:
            yield scores


def _iter_std_curve(values: Iterable[float]) -> Iterator[float]:
    """Yield the sample standard deviation of the first k *values* for each k, by Welford's algorithm."""
    mean = squares = 0.0
    for k, value in enumerate(values, 1):
        difference = value - mean
        mean += difference / k
        squares += difference * (value - mean)
        variance = squares / (k - 1) if k > 1 else 0.0
        # Beyond the range of a float the variance is infinite or NaN.
        yield math.sqrt(variance) if variance >= 0 else math.nan


def _average_available(curves: Iterable[Sequence[float]]) -> list[float]:
    """Average the tasks' curves at each k over the tasks that have at least k rollouts."""
    columns: list[list[float]] = []
    for curve in curves:
        columns.extend([] for _ in range(len(columns), len(curve)))
        for column, value in zip(columns, curve, strict=False):
            column.append(value)
    return list(map(mean, columns))


def _average_extended(curves: Iterable[Sequence[float]]) -> list[float]:
    """Average the tasks' curves at each k over all tasks; a shorter curve keeps its last value."""
    all_curves = list(curves)
    longest = max(map(len, all_curves), default=0)
    columns: list[list[float]] = [[] for _ in range(longest)]
    ended = [0.0] * (longest + 1)
    for curve in all_curves:
        for column, value in zip(columns, curve, strict=False):
            column.append(value)
        ended[len(curve)] += curve[-1]
    return [
        _apply_scaled([*column, extended], lambda values: math.fsum(values) / len(all_curves))
        for column, extended in zip(columns, accumulate(ended), strict=False)
    ]
