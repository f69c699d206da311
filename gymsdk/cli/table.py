"""A run's figures as a table for people."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table


def table(figures: list[dict[str, Any]]) -> None:
    """Print the figures, a column for each environment."""
    columns = [dict(_figures(each)) for each in figures]
    names = list(dict.fromkeys(name for column in columns for name in column))
    drawn = Table(box=None, pad_edge=False)
    drawn.add_column("")
    for each in figures:
        drawn.add_column(each["environment"], justify="right")
    for name in names:
        drawn.add_row(name, *(column.get(name, "") for column in columns))
    Console().print(drawn)


def _figures(summary: dict[str, Any]) -> Iterator[tuple[str, str]]:
    outcomes, figures = summary["outcomes"], summary["agent_metrics"]
    yield "scored", f"{outcomes.get('scored', 0)} of {sum(outcomes.values())}"
    if "mean/reward" in figures:
        yield "mean reward", f"{figures['mean/reward']:.3f} ± {figures['stderr/reward']:.3f}"
    for key, value in figures.items():
        if re.fullmatch(r"(pass|majority)@\d+/accuracy", key):
            yield key.removesuffix("/accuracy"), f"{value:.1f} %"
    for kind, count in summary["failures"].items():
        yield f"failed: {kind}", str(count)
    for role, used in summary["usage"].items():
        yield f"tokens in / out, {role}", f"{used.get('input_tokens', 0):,} / {used.get('output_tokens', 0):,}"
    for stage, seconds in summary["seconds"].items():
        yield f"seconds in {stage}", f"{seconds:.4f}"
