"""The figures of the environment: the mean reward by family and by difficulty."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from statistics import fmean

from gymsdk import Rollout


def accuracies(rollouts: Iterable[Rollout]) -> dict[str, float]:
    """The mean reward per family and per difficulty, of the rollouts whose rows name them."""
    groups: defaultdict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        family, difficulty = rollout.row.get("family"), rollout.row.get("difficulty")
        if rollout.reward is None:
            continue
        if family is not None:
            groups[f"accuracy/{family}"].append(rollout.reward)
        if difficulty is not None:
            groups[f"accuracy/difficulty_{difficulty}"].append(rollout.reward)
    return {name: fmean(rewards) for name, rewards in sorted(groups.items())}
