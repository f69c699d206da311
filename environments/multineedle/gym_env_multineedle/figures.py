"""The metrics of the environment: the mean reward by number of needles."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from statistics import fmean

from gymsdk import Rollout


def by_needles(rollouts: Iterable[Rollout]) -> dict[str, float]:
    """Return `needles=<n>/mean/reward` for each number of expected values."""
    found: defaultdict[int, list[float]] = defaultdict(list)
    for rollout in rollouts:
        if rollout.reward is not None:
            found[len(rollout.row["expected_synonym_values"])].append(rollout.reward)
    return {f"needles={number}/mean/reward": fmean(found[number]) for number in sorted(found)}
