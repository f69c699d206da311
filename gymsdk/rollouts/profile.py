"""A profile: what a model's rollouts say about training on an environment, before a training run is paid for."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist, fmean, quantiles
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from pydantic import BaseModel, ConfigDict

from gymsdk.errors import UsageError
from gymsdk.metrics import ROLLOUT_INDEX, TASK_INDEX, ScoredRollout, compute_pass_curve, group_by_task, std
from gymsdk.types import Row

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


def pass_intervals(rollouts: Iterable[ScoredRollout], *, confidence: float = 0.95) -> dict[int, Estimate]:
    """Give pass@k of the reward with its interval, for every k that some task has rollouts for."""
    curves = [
        compute_pass_curve([rollout.reward for rollout in repeats]) for repeats in group_by_task(rollouts).values()
    ]
    longest = max(map(len, curves), default=0)
    found = {}
    for k in range(1, longest + 1):
        curves = [curve for curve in curves if len(curve) >= k]
        values = [curve[k - 1] for curve in curves]
        found[k] = interval(values, observations=sum(map(len, curves)), confidence=confidence)
    return found


def zero_variance(rollouts: Iterable[ScoredRollout]) -> float | None:
    """Give the share of tasks whose repeats all earn the same, so that they teach nothing; `None` without repeats."""
    repeated = [repeats for repeats in group_by_task(rollouts).values() if len(repeats) > 1]
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


def bands(rollouts: Iterable[ScoredRollout], *, maxima: Mapping[int, float] | None = None) -> dict[Band, int]:
    """Give how many tasks are in each band; *maxima* are the best rewards, by task, 1 where a task has none there."""
    counts = Counter(
        _band([rollout.reward for rollout in repeats], (maxima or {}).get(task, 1.0))
        for task, repeats in group_by_task(rollouts).items()
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


BEARABLE = 0.02
"""The share of rollouts without a reward that training bears."""

MOST = 0.9
"""The share of tasks that makes a band the whole story."""

THIN = 0.3
"""The share of groups that must differ for a trainer to learn at a fair price."""


class Profile(BaseModel):
    """Figures of one environment and model.

    *maximum* is the best reward the environment claims of any task; *flat* the share of groups whose repeats all earned
    the same (they teach a group-based trainer nothing), `None` without repeats; *grading* milliseconds of `verify`
    (`p50`, `p99`), waits for a worker among them; *tokens* the policy's output tokens per turn, *turns* its turns per
    rollout.
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
class _Seen:
    """What a profile needs of the scored lines."""

    rollouts: list[ScoredRollout] = field(default_factory=list)
    grading: list[float] = field(default_factory=list)
    turns: int = 0
    calls: int = 0
    tokens: int = 0

    def add(self, line: Row) -> None:
        ours = line["gymsdk"]
        self.rollouts.append(ScoredRollout(task=line[TASK_INDEX], repeat=line[ROLLOUT_INDEX], reward=line["reward"]))
        self.grading.append(ours["timing"]["stages"].get("verify", 0.0))
        self.turns += ours["turns"]
        # The calls of earlier tries are in the usage, not among the turns.
        used = ours["usage"].get("policy", {})
        self.calls += used.get("calls", 0)
        self.tokens += used.get("output_tokens", 0)


def profiled(
    environment: str,
    model: str,
    scored: Iterable[Row],
    failed: Iterable[Row],
    *,
    maxima: Mapping[int, float] | None = None,
) -> Profile:
    """Give the profile of a run's lines; *maxima* are the best rewards, by task, 1 where a task has none there."""
    seen = _Seen()
    for line in scored:
        seen.add(line)
    groups = _groups(seen.rollouts)
    found = Profile(
        environment=environment,
        model=model,
        tasks=len(groups),
        repeats=max(map(len, groups), default=0),
        scored=len(seen.rollouts),
        maximum=max((maxima or {}).values(), default=1.0),
        failures=dict(Counter(line["_ng_failure_class"] for line in failed).most_common()),
        reward=interval(list(map(fmean, groups)), observations=len(seen.rollouts)) if groups else None,
        flat=zero_variance(seen.rollouts),
        rewards=histogram(each.reward for each in seen.rollouts),
        bands={str(band): count for band, count in bands(seen.rollouts, maxima=maxima).items()},
        passes=pass_intervals(seen.rollouts),
        grading=_grading(seen.grading),
        tokens=seen.tokens / seen.calls if seen.calls else None,
        turns=seen.turns / len(seen.rollouts) if seen.rollouts else None,
    )
    return found.model_copy(update={"verdict": verdict(found)})


def _groups(rollouts: Iterable[ScoredRollout]) -> list[list[float]]:
    groups: defaultdict[int, list[float]] = defaultdict(list)
    for each in rollouts:
        groups[each.task].append(each.reward)
    return list(groups.values())


def _grading(spent: list[float]) -> dict[str, float]:
    if len(spent) < 2:  # noqa: PLR2004  # quantiles need two values
        return {"p50": spent[0], "p99": spent[0]} if spent else {}
    cuts = quantiles(spent, n=100, method="inclusive")
    return {"p50": cuts[49], "p99": cuts[98]}


def verdict(profile: Profile) -> str:
    """Give one plain sentence: whether to train on this, and what to mend first."""
    failed = sum(profile.failures.values())
    taught = 0.0 if profile.flat is None else 1 - profile.flat
    most, groups = MOST * profile.tasks, f"{profile.tasks} groups"
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
            f"Thin signal: only {taught:.0%} of {groups} differ within themselves; filter tasks by difficulty.",
        ),
    ]
    ready = f"Ready to train: {taught:.0%} of {groups} differ within themselves."
    return next((sentence for holds, sentence in found if holds), ready)


if TYPE_CHECKING:
    from matplotlib.axes import Axes

TICKS = 16
"""How many marks an axis takes before they run into each other."""


def draw(profile: Profile, path: Path) -> None:
    """Write *profile* as a PNG; raises `UsageError` where matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("drawing needs matplotlib: `pip install 'gymsdk[plot]'`, or leave out --plot") from None
    figure = Figure(figsize=(12, 4), layout="constrained")
    FigureCanvasAgg(figure)
    rewards, bands, passes = figure.subplots(1, 3)
    _rewards(rewards, profile)
    _bands(bands, profile)
    _passes(passes, profile)
    played = f"{profile.environment}, {profile.model}: {profile.scored} rollouts of {profile.tasks} tasks"
    figure.suptitle(f"{profile.verdict}\n{played}", fontsize=11)
    figure.savefig(path, dpi=120)


def _rewards(axes: Axes, profile: Profile) -> None:
    axes.bar(
        [bar.low for bar in profile.rewards],
        [bar.count for bar in profile.rewards],
        width=[max(bar.high - bar.low, 0.01) for bar in profile.rewards],
        align="edge",
        edgecolor="white",
    )
    axes.set(title="rewards", xlabel="reward", ylabel="rollouts")


def _bands(axes: Axes, profile: Profile) -> None:
    from matplotlib.ticker import MaxNLocator

    bars = axes.barh(list(profile.bands), list(profile.bands.values()), color="tab:green")
    axes.bar_label(bars, padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(title="difficulty for this model", xlabel="tasks")


def _passes(axes: Axes, profile: Profile) -> None:
    ks = sorted(profile.passes)
    values = [profile.passes[k].value for k in ks]
    below = [profile.passes[k].value - profile.passes[k].low for k in ks]
    above = [profile.passes[k].high - profile.passes[k].value for k in ks]
    axes.errorbar(ks, values, yerr=[below, above], marker="o", capsize=3, color="tab:orange")
    axes.set(title="pass@k, with its 95 % interval", xlabel="k")
    if len(ks) <= TICKS:
        axes.set_xticks(ks)
    if profile.rewards and profile.rewards[0].low >= 0 and profile.rewards[-1].high <= 1:
        axes.set_ylim(-0.03, 1.03)
