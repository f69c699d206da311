"""Profile the rollouts of a model, to decide whether an environment is worth a training run with this model."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist, fmean, quantiles
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from pydantic import BaseModel, ConfigDict

from gymsdk.errors import UsageError
from gymsdk.line import StoredRollout, get_object
from gymsdk.metrics import ScoredRollout, compute_bin_edges, compute_pass_curve, group_by_task, std, to_fraction

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Band: TypeAlias = Literal["always wrong", "hard", "medium", "easy", "always right"]
"""The difficulty of a task: no reward, a mean reward below 1/3 of the maximum, up to 2/3, above, always the maximum."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over tasks and its confidence interval, in units of reward."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Bin:
    """The number of values with `low <= value < high`; the last bin of a histogram includes its upper end."""

    low: float
    high: float
    count: int


def compute_interval(values: Sequence[float], *, observations: int | None = None, confidence: float = 0.95) -> Estimate:
    """Return the mean of one value per task with its confidence interval over tasks.

    For values between 0 and 1 this is Wilson's interval at the effective sample size, which does not collapse when all
    tasks agree; for others it is the normal interval.

    Args:
        values: One value per task.
        observations: The number of rollouts behind the values.
        confidence: The confidence level.
    """
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    mean, error = fmean(values), std(values) / math.sqrt(len(values))
    if not all(0 <= value <= 1 for value in values):
        return Estimate(mean, mean - z * error, mean + z * error)
    size = _compute_effective_size(mean, error, tasks=len(values), observations=max(observations or 0, len(values)))
    middle = (mean + z * z / (2 * size)) / (1 + z * z / size)
    half = z / (1 + z * z / size) * math.sqrt(mean * (1 - mean) / size + (z / (2 * size)) ** 2)
    return Estimate(mean, max(0.0, min(mean, middle - half)), min(1.0, max(mean, middle + half)))


def _compute_effective_size(mean: float, error: float, *, tasks: int, observations: int) -> float:
    """Return the number of independent trials that would have the standard error of the tasks."""
    if tasks == 1:
        return observations
    if mean in {0.0, 1.0}:
        return tasks
    return observations if error == 0 else min(observations, mean * (1 - mean) / error**2)


def compute_pass_intervals(rollouts: Iterable[ScoredRollout], *, confidence: float = 0.95) -> dict[int, Estimate]:
    """Return pass@k of the reward with its interval, for every k up to the most repeats of a task."""
    curves = [
        compute_pass_curve([rollout.reward for rollout in repeats]) for repeats in group_by_task(rollouts).values()
    ]
    longest = max(map(len, curves), default=0)
    breakdowns = {}
    for k in range(1, longest + 1):
        curves = [curve for curve in curves if len(curve) >= k]
        values = [curve[k - 1] for curve in curves]
        breakdowns[k] = compute_interval(values, observations=sum(map(len, curves)), confidence=confidence)
    return breakdowns


def compute_zero_variance_share(rollouts: Iterable[ScoredRollout]) -> float | None:
    """Return the share of tasks with the same reward in all repeats, or `None` without repeats."""
    repeated = [repeats for repeats in group_by_task(rollouts).values() if len(repeats) > 1]
    if not repeated:
        return None
    return fmean(len({rollout.reward for rollout in repeats}) == 1 for repeats in repeated)


def build_histogram(values: Iterable[float], *, bins: int = 10) -> list[Bin]:
    """Count *values* in *bins* of equal width, from 0 to 1 if all values fit, else from the minimum to the maximum.

    Equal values outside 0 to 1 share one bin. Without values there are no bins.
    """
    ordered = list(values)
    if not ordered:
        return []
    low, high = min(*ordered, 0.0), max(*ordered, 1.0)
    if low < 0 or high > 1:
        low, high = min(ordered), max(ordered)
    if low == high:
        return [Bin(low, high, len(ordered))]
    edges = compute_bin_edges(low, high, bins)
    # The last bin includes its upper end.
    counts = Counter(min(bisect_right(edges, value), bins) - 1 for value in ordered)
    return [Bin(*ends, counts[number]) for number, ends in enumerate(pairwise(edges))]


def count_bands(rollouts: Iterable[ScoredRollout], *, maxima: Mapping[int, float] | None = None) -> dict[Band, int]:
    """Count the tasks in each band; *maxima* are the best possible rewards by task, 1 by default."""
    counts = Counter(
        _classify([rollout.reward for rollout in repeats], (maxima or {}).get(task, 1.0))
        for task, repeats in group_by_task(rollouts).items()
    )
    return {band: counts[band] for band in get_args(Band)}


def _classify(rewards: Sequence[float], maximum: float) -> Band:
    if min(rewards) >= maximum:
        return "always right"
    if max(rewards) <= 0 or maximum <= 0:
        return "always wrong"
    if math.isinf(maximum):
        return "hard"
    # Quotients of floats miss the thirds.
    share = sum(map(to_fraction, rewards), Fraction(0)) / (len(rewards) * to_fraction(maximum))
    if share < Fraction(1, 3):
        return "hard"
    return "medium" if share <= Fraction(2, 3) else "easy"


MAX_FAILURE_SHARE = 0.02
"""The share of failed rollouts up to which a training run is worthwhile."""

DOMINANT_SHARE = 0.9
"""The share of tasks from which on one band decides the verdict."""

MIN_DIFFERING_SHARE = 0.3
"""The share of groups with differing rewards that a trainer needs to learn efficiently."""


class Profile(BaseModel):
    """Statistics of one environment and model.

    Attributes:
        verdict: One sentence: whether to train on the environment, and what to correct first.
        maximum: The best possible reward of any task, as the environment declares it.
        flat: The share of groups whose repeats all have the same reward: a group-based trainer learns nothing from
            them. `None` without repeats.
        grading: Milliseconds of `verify` (`p50`, `p99`), including the wait for a worker.
        tokens: The policy's output tokens per turn.
        turns: The policy's turns per rollout.
    """

    model_config = ConfigDict(frozen=True)

    environment: str
    model: str
    verdict: str = ""
    tasks: int
    repeats: int
    scored: int
    maximum: float
    failures: dict[str, int]
    reward: Estimate | None
    flat: float | None
    rewards: list[Bin]
    bands: dict[str, int]
    passes: dict[int, Estimate]
    grading: dict[str, float]
    tokens: float | None
    turns: float | None


@dataclass(slots=True)
class _LineTotals:
    """The sums over the lines."""

    rollouts: list[ScoredRollout] = field(default_factory=list)
    grading: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    turns: int = 0
    calls: int = 0
    tokens: int = 0

    def add(self, stored: StoredRollout) -> None:
        absent = stored.find_no_reward()
        if absent is not None:
            self.failures[absent.kind] += 1
            return
        task, repeat = stored.key
        self.rollouts.append(ScoredRollout(task=task, repeat=repeat, reward=float(stored.line["reward"])))
        self.grading.append(stored.stages.get("verify", 0.0))
        self.turns += stored.turns
        # The usage includes the calls of failed attempts, the turns do not.
        used = get_object(stored.usage, "policy")
        self.calls += used.get("calls", 0)
        self.tokens += used.get("output_tokens", 0)


def build_profile(
    environment: str,
    model: str,
    rollouts: Iterable[StoredRollout],
    *,
    maxima: Mapping[int, float] | None = None,
) -> Profile:
    """Profile the rollouts of a run; *maxima* are the best possible rewards by task, 1 by default."""
    totals = _LineTotals()
    for stored in rollouts:
        totals.add(stored)
    groups = _group_rewards(totals.rollouts)
    profile = Profile(
        environment=environment,
        model=model,
        tasks=len(groups),
        repeats=max(map(len, groups), default=0),
        scored=len(totals.rollouts),
        maximum=max((maxima or {}).values(), default=1.0),
        failures=dict(totals.failures.most_common()),
        reward=compute_interval(list(map(fmean, groups)), observations=len(totals.rollouts)) if groups else None,
        flat=compute_zero_variance_share(totals.rollouts),
        rewards=build_histogram(rollout.reward for rollout in totals.rollouts),
        bands={str(band): count for band, count in count_bands(totals.rollouts, maxima=maxima).items()},
        passes=compute_pass_intervals(totals.rollouts),
        grading=_compute_grading_quantiles(totals.grading),
        tokens=totals.tokens / totals.calls if totals.calls else None,
        turns=totals.turns / len(totals.rollouts) if totals.rollouts else None,
    )
    return profile.model_copy(update={"verdict": summarize_profile(profile)})


def _group_rewards(rollouts: Iterable[ScoredRollout]) -> list[list[float]]:
    groups: defaultdict[int, list[float]] = defaultdict(list)
    for rollout in rollouts:
        groups[rollout.task].append(rollout.reward)
    return list(groups.values())


def _compute_grading_quantiles(durations: list[float]) -> dict[str, float]:
    if len(durations) < 2:  # noqa: PLR2004  # quantiles need two values
        return {"p50": durations[0], "p99": durations[0]} if durations else {}
    cuts = quantiles(durations, n=100, method="inclusive")
    return {"p50": cuts[49], "p99": cuts[98]}


def summarize_profile(profile: Profile) -> str:
    """Return one sentence: whether to train on this environment, and what to correct first."""
    failed = sum(profile.failures.values())
    taught = 0.0 if profile.flat is None else 1 - profile.flat
    most, groups = DOMINANT_SHARE * profile.tasks, f"{profile.tasks} groups"
    rows = [
        (not profile.scored, "No rollout was scored: correct the failures first."),
        (
            failed > MAX_FAILURE_SHARE * (failed + profile.scored),
            f"{failed} of {failed + profile.scored} rollouts have no reward: correct the failures before training.",
        ),
        (profile.bands.get("always wrong", 0) >= most, "Too hard for this model: most tasks are never solved."),
        (profile.bands.get("always right", 0) >= most, "Too easy for this model: most tasks are always solved."),
        (profile.flat is None, "Play each task several times (-k 8) to see whether its rollouts differ."),
        (
            taught < MIN_DIFFERING_SHARE,
            f"Thin signal: only {taught:.0%} of {groups} differ within themselves; filter tasks by difficulty.",
        ),
    ]
    ready = f"Ready to train: {taught:.0%} of {groups} differ within themselves."
    return next((sentence for holds, sentence in rows if holds), ready)


MAX_AXIS_TICKS = 16
"""How many ticks fit on an axis without overlap."""


def draw_profile(profile: Profile, path: Path) -> None:
    """Plot *profile* as a PNG; raises `UsageError` if matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("drawing needs matplotlib: `pip install 'gymsdk[plot]'`, or leave out --plot") from None
    figure = Figure(figsize=(12, 4), layout="constrained")
    FigureCanvasAgg(figure)
    rewards, bands, passes = figure.subplots(1, 3)
    _draw_rewards(rewards, profile)
    _draw_bands(bands, profile)
    _draw_passes(passes, profile)
    played = f"{profile.environment}, {profile.model}: {profile.scored} rollouts of {profile.tasks} tasks"
    figure.suptitle(f"{profile.verdict}\n{played}", fontsize=11)
    figure.savefig(path, dpi=120)


def _draw_rewards(axes: Axes, profile: Profile) -> None:
    axes.bar(
        [bar.low for bar in profile.rewards],
        [bar.count for bar in profile.rewards],
        width=[max(bar.high - bar.low, 0.01) for bar in profile.rewards],
        align="edge",
        edgecolor="white",
    )
    axes.set(title="rewards", xlabel="reward", ylabel="rollouts")


def _draw_bands(axes: Axes, profile: Profile) -> None:
    from matplotlib.ticker import MaxNLocator

    bars = axes.barh(list(profile.bands), list(profile.bands.values()), color="tab:green")
    axes.bar_label(bars, padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(title="difficulty for this model", xlabel="tasks")


def _draw_passes(axes: Axes, profile: Profile) -> None:
    ks = sorted(profile.passes)
    values = [profile.passes[k].value for k in ks]
    below = [profile.passes[k].value - profile.passes[k].low for k in ks]
    above = [profile.passes[k].high - profile.passes[k].value for k in ks]
    axes.errorbar(ks, values, yerr=[below, above], marker="o", capsize=3, color="tab:orange")
    axes.set(title="pass@k, with its 95 % interval", xlabel="k")
    if len(ks) <= MAX_AXIS_TICKS:
        axes.set_xticks(ks)
    if profile.rewards and profile.rewards[0].low >= 0 and profile.rewards[-1].high <= 1:
        axes.set_ylim(-0.03, 1.03)
