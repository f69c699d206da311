"""Difficulty: what the repeats of each task say about it before a training run is paid for."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean
from typing import Literal, TypeAlias, get_args

from gymsdk.metrics import Scored, grouped, pass_curve, std

Band: TypeAlias = Literal["always wrong", "hard", "medium", "easy", "always right"]
"""Where a task stands: no reward ever, a mean below a third of the best, up to two thirds, above, the best always."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over tasks with its confidence interval, in units of reward."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Bin:
    """How many values lie in `low <= value < high`; the last bin of a histogram holds its upper end too."""

    low: float
    high: float
    count: int


def interval(values: Sequence[float], *, observations: int | None = None, confidence: float = 0.95) -> Estimate:
    """Give the mean of one value per task with its interval over tasks; *observations* are the rollouts behind them.

    Between 0 and 1 it is Wilson's interval at the effective sample size, which stays honest where all tasks agree;
    beyond, the normal one.
    """
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    mean, error = fmean(values), std(values) / math.sqrt(len(values))
    if not all(0 <= value <= 1 for value in values):
        return Estimate(mean, mean - z * error, mean + z * error)
    size = _effective(mean, error, tasks=len(values), observations=max(observations or 0, len(values)))
    middle = (mean + z * z / (2 * size)) / (1 + z * z / size)
    half = z / (1 + z * z / size) * math.sqrt(mean * (1 - mean) / size + (z / (2 * size)) ** 2)
    return Estimate(mean, max(0.0, min(mean, middle - half)), min(1.0, max(mean, middle + half)))


def _effective(mean: float, error: float, *, tasks: int, observations: int) -> float:
    """Give how many independent trials would have the standard error that the tasks have."""
    if tasks == 1:
        return observations
    if mean in {0.0, 1.0}:
        return tasks
    return observations if error == 0 else min(observations, mean * (1 - mean) / error**2)


def pass_intervals(rollouts: Iterable[Scored], *, confidence: float = 0.95) -> dict[int, Estimate]:
    """Give pass@k of the reward with its interval, for every k that some task has rollouts for."""
    curves = [pass_curve([rollout.reward for rollout in repeats]) for repeats in grouped(rollouts).values()]
    longest = max(map(len, curves), default=0)
    found = {}
    for k in range(1, longest + 1):
        curves = [curve for curve in curves if len(curve) >= k]
        values = [curve[k - 1] for curve in curves]
        found[k] = interval(values, observations=sum(map(len, curves)), confidence=confidence)
    return found


def zero_variance(rollouts: Iterable[Scored]) -> float | None:
    """Give the share of tasks whose repeats all earn the same, so that they teach nothing; `None` without repeats."""
    repeated = [repeats for repeats in grouped(rollouts).values() if len(repeats) > 1]
    if not repeated:
        return None
    return fmean(len({rollout.reward for rollout in repeats}) == 1 for repeats in repeated)


def histogram(values: Iterable[float], *, bins: int = 10) -> list[Bin]:
    """Give *values* in *bins* of one width, from 0 to 1 where that holds them all, else from the least to the largest.

    Values all alike out there share one bin; no values have none.
    """
    found = list(values)
    if not found:
        return []
    low, high = min(*found, 0.0), max(*found, 1.0)
    if low < 0 or high > 1:
        low, high = min(found), max(found)
    if low == high:
        return [Bin(low, high, len(found))]
    edges = [low + (high - low) * number / bins for number in range(bins)]
    counts = Counter(bisect_right(edges, value) - 1 for value in found)
    return [Bin(*ends, counts[number]) for number, ends in enumerate(zip(edges, [*edges[1:], high], strict=True))]


def bands(rollouts: Iterable[Scored], *, maxima: Mapping[int, float] | None = None) -> dict[Band, int]:
    """Give how many tasks are in each band; *maxima* are the best rewards, by task, 1 where a task has none there."""
    counts = Counter(
        _band([rollout.reward for rollout in repeats], (maxima or {}).get(task, 1.0))
        for task, repeats in grouped(rollouts).items()
    )
    return {band: counts[band] for band in get_args(Band)}


def _band(rewards: Sequence[float], maximum: float) -> Band:
    if min(rewards) >= maximum:
        return "always right"
    if max(rewards) <= 0 or maximum <= 0:
        return "always wrong"
    share = fmean(rewards) / maximum
    if share < 1 / 3:
        return "hard"
    return "medium" if share <= 2 / 3 else "easy"
