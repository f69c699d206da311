"""A run's figures as a table for people."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any


def table(figures: Sequence[dict[str, Any]]) -> str:
    """Give the figures, a column for each environment, what failed said beneath."""
    columns = [dict(_figures(each)) for each in figures]
    found = dict.fromkeys(name for column in columns for name in column)
    names = sorted(found, key=lambda name: next(place for place, word in enumerate(ORDER) if name.startswith(word)))
    cells = [["", *(each["environment"] for each in figures)]]
    cells += [[name, *(column.get(name, "") for column in columns)] for name in names]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    told = dict.fromkeys(line for each in figures for line in _told(each))
    return "\n".join([*(_line(row, widths) for row in cells), *told])


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = zip(row, widths, strict=True)
    return "  ".join([f"{first[0]:<{first[1]}}", *(f"{cell:>{width}}" for cell, width in rest)]).rstrip()


def _figures(summary: dict[str, Any]) -> Iterator[tuple[str, str]]:
    outcomes, figures = summary["outcomes"], summary["agent_metrics"]
    yield "scored", f"{outcomes.get('scored', 0):,} of {sum(outcomes.values()):,}"
    if "mean/reward" in figures:
        yield "mean reward ± standard error", f"{figures['mean/reward']:.3f} ± {figures['stderr/reward']:.3f}"
    for key, value in figures.items():
        # A majority of one says nothing that pass@1 does not.
        if re.fullmatch(r"(pass@\d+|majority@([2-9]|\d\d+))/accuracy", key):
            yield key.removesuffix("/accuracy"), f"{value:.1f} %"
    for why, count in summary["ended"].items():
        if why != "done":
            yield f"out of {WHY[why]}", f"{count:,}"
    yield from ((words, f"{summary[key]:,}") for key, words in TOO_MUCH.items() if summary[key])
    for kind, count in summary["failures"].items():
        yield f"no reward: {kind}", f"{count:,}"
    for role, used in summary["usage"].items():
        yield f"tokens in, {role}", f"{used.get('input_tokens', 0):,}"
        yield f"tokens out, {role}", f"{used.get('output_tokens', 0):,}"
    for stage, seconds in summary["seconds"].items():
        yield f"seconds in {stage}", f"{seconds:.4f}" if seconds >= LEAST else f"<{LEAST}"


ORDER = (
    *("scored", "mean", "pass", "majority", "out of", "prompt", "too much", "no reward"),
    *("tokens in", "tokens out", "seconds"),
)
"""What the rows begin with, from the top of the table to its end."""

TOO_MUCH = {"prompts_too_long": "prompt too long", "grader_timeouts": "too much for the grader"}
"""What was too much, and for whom."""

WHY = {"turns": "turns", "tools": "tool calls", "tokens": "tokens", "deadline": "time"}
"""What an episode ran out of, by how it ended."""

LEAST = 0.0001
"""Seconds below which a stage is shown as that."""


def _told(summary: dict[str, Any]) -> Iterator[str]:
    for kind, message in summary["failure_messages"].items():
        yield f"{kind}: {message}"
    if summary["complaint"]:
        yield f"no figures of its own: {summary['complaint']}"
