"""Figures over many rollouts: the means of the verdict's fields, and accuracy by number of needles."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from gymsdk import Rollout

FIELDS = ("accuracy", "set_overlap", "original_term_minefield_hit", "order_instruction_following_failure")


def means(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Give `mean/<field>` for every boolean or numeric field of the verdicts."""
    verdicts = list(map(_fields, rollouts))
    found = {field: [verdict[field] for verdict in verdicts if field in verdict] for field in FIELDS}
    return {f"mean/{field}": fmean(values) for field, values in found.items() if values}


def by_needles(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Give `needles=<n>/mean/accuracy` for each number of expected values."""
    found: defaultdict[int, list[bool]] = defaultdict(list)
    for rollout in rollouts:
        if "accuracy" in (verdict := _fields(rollout)):
            found[len(rollout.row["expected_synonym_values"])].append(verdict["accuracy"])
    return {f"needles={number}/mean/accuracy": fmean(found[number]) for number in sorted(found)}


def _fields(rollout: Rollout) -> dict[str, Any]:
    # Not always a `SynonymVerdict`: one read back from disk has the same fields, but no type of ours.
    return rollout.verdict.model_dump() if rollout.verdict else {}
