"""A profile: what a model's rollouts say about training on an environment, before a training run is paid for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean, quantiles

from pydantic import BaseModel, ConfigDict

from gymsdk import difficulty
from gymsdk.metrics import Scored
from gymsdk.types import Row

BEARABLE = 0.02
"""The share of rollouts without a reward that training bears."""

MOST = 0.9
"""The share of tasks that makes a band the whole story."""

THIN = 0.3
"""The share of groups that must differ for a trainer to learn at a fair price."""


class Bar(BaseModel):
    """Rollouts whose reward lies between *low* and *high*."""

    model_config = ConfigDict(frozen=True)

    low: float
    high: float
    count: int


class Interval(BaseModel):
    """An estimate with its 95 % confidence interval."""

    model_config = ConfigDict(frozen=True)

    value: float
    low: float
    high: float


class Profile(BaseModel):
    """Figures of one environment and model.

    *flat* is the share of groups whose repeats all earned the same (they teach a group-based trainer nothing),
    `None` without repeats; *grading* are milliseconds of `verify` (`p50`, `p99`); *tokens* a policy's output tokens
    per turn.
    """

    model_config = ConfigDict(frozen=True)

    environment: str
    model: str
    tasks: int
    repeats: int
    scored: int
    failures: dict[str, int]
    reward: Interval | None
    flat: float | None
    rewards: list[Bar]
    bands: dict[str, int]
    passes: dict[int, Interval]
    grading: dict[str, float]
    tokens: float | None


def profiled(
    environment: str, model: str, scored: Sequence[Row], failed: Sequence[Row], *, maximum: float = 1.0
) -> Profile:
    """Give the profile of a run's lines."""
    rollouts = [
        Scored(task=line["_ng_task_index"], repeat=line["_ng_rollout_index"], reward=line["reward"]) for line in scored
    ]
    means = [fmean(each) for each in _groups(rollouts)]
    return Profile(
        environment=environment,
        model=model,
        tasks=len(means),
        repeats=max(map(len, _groups(rollouts)), default=0),
        scored=len(scored),
        failures=dict(Counter(line["_ng_failure_class"] for line in failed).most_common()),
        reward=_interval(difficulty.interval(means, observations=len(rollouts))) if means else None,
        flat=difficulty.zero_variance(rollouts),
        rewards=[Bar(low=b.low, high=b.high, count=b.count) for b in difficulty.histogram(r.reward for r in rollouts)],
        bands={str(band): count for band, count in difficulty.bands(rollouts, maximum=maximum).items()},
        passes={k: _interval(each) for k, each in difficulty.pass_intervals(rollouts).items()},
        grading=_grading([line["gymsdk"]["timing"]["stages"].get("verify", 0.0) for line in scored]),
        tokens=_tokens(scored),
    )


def _groups(rollouts: Sequence[Scored]) -> list[list[float]]:
    groups: dict[int, list[float]] = {}
    for each in rollouts:
        groups.setdefault(each.task, []).append(each.reward)
    return list(groups.values())


def _interval(estimate: difficulty.Estimate) -> Interval:
    return Interval(value=estimate.value, low=estimate.low, high=estimate.high)


def _grading(spent: Sequence[float]) -> dict[str, float]:
    if len(spent) < 2:  # noqa: PLR2004  # quantiles need two values
        return {"p50": spent[0], "p99": spent[0]} if spent else {}
    cuts = quantiles(spent, n=100, method="inclusive")
    return {"p50": cuts[49], "p99": cuts[98]}


def _tokens(scored: Sequence[Row]) -> float | None:
    turns = sum(line["gymsdk"]["turns"] for line in scored)
    used = sum(line["gymsdk"]["usage"].get("policy", {}).get("output_tokens", 0) for line in scored)
    return used / turns if turns else None


def verdict(profile: Profile) -> str:
    """Give one plain sentence: whether to train on this, and what to mend first."""
    failed = sum(profile.failures.values())
    taught = 0.0 if profile.flat is None else 1 - profile.flat
    most = MOST * profile.tasks
    found = [
        (not profile.scored, "Not one rollout was scored: mend the failures first."),
        (
            failed > BEARABLE * (failed + profile.scored),
            f"{failed} of {failed + profile.scored} rollouts have no reward: mend the failures before training.",
        ),
        (profile.bands.get("always wrong", 0) >= most, "Too hard for this model: most tasks are never solved."),
        (profile.bands.get("always right", 0) >= most, "Too easy for this model: most tasks are always solved."),
        (profile.flat is None, "Play each task several times (-k 8) to see whether its rollouts differ."),
        (
            taught < THIN,
            f"Thin signal: only {taught:.0%} of the groups differ within themselves; filter tasks by difficulty.",
        ),
    ]
    ready = f"Ready to train: {taught:.0%} of the groups differ within themselves."
    return next((sentence for holds, sentence in found if holds), ready)
