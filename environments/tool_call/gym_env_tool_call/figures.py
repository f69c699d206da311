"""The figures of the environment: the mean reward by kind and by calls needed, and how often it did too much."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import fmean

from gymsdk import Rollout


def figures(rollouts: Iterable[Rollout]) -> dict[str, float]:
    """Give `<subset>/mean/reward` by kind and by calls needed, and the share that did what nobody asked for."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        # A verdict read back from a file is no `Graded`, and the host's own has only a reward.
        fields = rollout.verdict.model_dump() if rollout.verdict else {}
        for subset in _subsets(rollout.row, fields):
            found[f"{subset}/mean/reward"].append(rollout.reward or 0.0)
        if "unasked" in fields:
            found["overstepped"].append(float(fields["unasked"] > 0))
    return {name: fmean(values) for name, values in sorted(found.items())}


def _subsets(row: Mapping[str, object], fields: Mapping[str, object]) -> list[str]:
    by = {"kind": fields.get("kind") or row.get("kind"), "calls": fields.get("calls_needed")}
    return [f"{name}={value}" for name, value in by.items() if value is not None]
