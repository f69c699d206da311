"""The metrics of the environment: mean rewards by family and by difficulty, from math-verify and from the judge."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from statistics import fmean

from gymsdk import Rollout


def figures(rollouts: Iterable[Rollout]) -> dict[str, float]:
    """Compute the metrics of *rollouts*.

    Returns:
        `<subset>/mean/reward` for each family and difficulty in the rows, `symbolic_accuracy`, and
        `judge_accuracy` if a judge graded any rollout.
    """
    found: defaultdict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        for name, value in _scores(rollout):
            found[name].append(value)
    return {name: fmean(values) for name, values in sorted(found.items())}


def _scores(rollout: Rollout) -> Iterator[tuple[str, float]]:
    if rollout.reward is None:
        return
    for name in ("family", "difficulty"):
        if (value := rollout.row.get(name)) is not None:
            yield f"{name}={value}/mean/reward", rollout.reward
    # A verdict from a file is a plain `Verdict` with extra fields. A verdict from the host has only a reward.
    fields = rollout.verdict.model_dump() if rollout.verdict else {}
    if "library_reward" in fields:
        yield "symbolic_accuracy", fields["library_reward"]
    if fields.get("judge_evaluations"):
        yield "judge_accuracy", rollout.reward
