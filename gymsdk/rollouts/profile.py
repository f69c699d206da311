"""A profile: what a model's rollouts say about training on an environment, before a training run is paid for."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean, quantiles

from pydantic import BaseModel, ConfigDict

from gymsdk.metrics import ROLLOUT_INDEX, TASK_INDEX, Scored
from gymsdk.rollouts import difficulty
from gymsdk.rollouts.difficulty import Bin, Estimate
from gymsdk.types import Row

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

    rollouts: list[Scored] = field(default_factory=list)
    grading: list[float] = field(default_factory=list)
    turns: int = 0
    calls: int = 0
    tokens: int = 0

    def add(self, line: Row) -> None:
        ours = line["gymsdk"]
        self.rollouts.append(Scored(task=line[TASK_INDEX], repeat=line[ROLLOUT_INDEX], reward=line["reward"]))
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
        reward=difficulty.interval(list(map(fmean, groups)), observations=len(seen.rollouts)) if groups else None,
        flat=difficulty.zero_variance(seen.rollouts),
        rewards=difficulty.histogram(each.reward for each in seen.rollouts),
        bands={str(band): count for band, count in difficulty.bands(seen.rollouts, maxima=maxima).items()},
        passes=difficulty.pass_intervals(seen.rollouts),
        grading=_grading(seen.grading),
        tokens=seen.tokens / seen.calls if seen.calls else None,
        turns=seen.turns / len(seen.rollouts) if seen.rollouts else None,
    )
    return found.model_copy(update={"verdict": verdict(found)})


def _groups(rollouts: Iterable[Scored]) -> list[list[float]]:
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
