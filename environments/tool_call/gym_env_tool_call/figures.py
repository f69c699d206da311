"""The metrics of the environment: mean rewards by kind and by needed calls, and the rate of unrequested actions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import fmean

from gymsdk import Rollout


def figures(rollouts: Iterable[Rollout]) -> dict[str, float]:
    """Compute the metrics of *rollouts*.

    Returns:
        `<subset>/mean/reward` by kind and by needed calls, and `overstepped`, the share of rollouts with
        unrequested actions.
    """
    found: defaultdict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        # A verdict from a file is a plain `Verdict` with extra fields. A verdict from the host has only a reward.
        fields = rollout.verdict.model_dump() if rollout.verdict else {}
        for subset in _subsets(rollout.row, fields):
            found[f"{subset}/mean/reward"].append(rollout.reward or 0.0)
        if "unasked" in fields:
            found["overstepped"].append(float(fields["unasked"] > 0))
    return {name: fmean(values) for name, values in sorted(found.items())}


def _subsets(row: Mapping[str, object], fields: Mapping[str, object]) -> list[str]:
    by = {"kind": fields.get("kind") or row.get("kind"), "calls": fields.get("calls_needed")}
    return [f"{name}={value}" for name, value in by.items() if value is not None]
