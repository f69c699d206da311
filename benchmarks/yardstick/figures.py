"""The figures of the benchmarks with their floors and limits, and the table of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

HEADER = ("row", "figure", "measured", "floor", "ratio", "limit")


@dataclass(frozen=True)
class Figure:
    """One measured value.

    Attributes:
        row: The name of the row of the table.
        name: What is measured.
        value: The measured value.
        unit: The unit of the value and of the floor.
        floor: What the same work costs without gymsdk, or the value to compare with; `None`: nothing to compare with.
        limit: The maximum of the ratio of the value to the floor; without a floor, of the value.
    """

    row: str
    name: str
    value: float
    unit: str = ""
    floor: float | None = None
    limit: float | None = None

    @property
    def ratio(self) -> float | None:
        """The ratio of the value to the floor."""
        return self.value / self.floor if self.floor else None

    @property
    def is_within_limit(self) -> bool:
        """Whether the ratio, or without a floor the value, is within the limit."""
        compared = self.value if self.ratio is None else self.ratio
        return self.limit is None or compared <= self.limit

    def to_json(self) -> dict[str, Any]:
        """Return the figure as a JSON object."""
        return asdict(self) | {"ratio": self.ratio, "is_within_limit": self.is_within_limit}


@dataclass(frozen=True)
class Skipped:
    """A row that cannot be measured here, and the reason."""

    row: str
    reason: str
    is_within_limit = True


@dataclass(frozen=True)
class Failed:
    """A row that could not be measured because of an error, and the error as one line."""

    row: str
    error: str
    is_within_limit = False


def format_figure(figure: Figure | Skipped | Failed) -> tuple[str, ...]:
    """Return the cells of one line of the table."""
    if isinstance(figure, Skipped):
        return figure.row, f"skipped: {figure.reason}", "", "", "", ""
    if isinstance(figure, Failed):
        return figure.row, f"failed: {figure.error.replace('|', '/')}", "", "", "", ""
    unit = figure.unit if figure.ratio is None else "x"
    limit = "" if figure.limit is None else f"{figure.limit:g} {unit}".strip()
    return (
        figure.row,
        figure.name,
        f"{_format_number(figure.value)} {figure.unit}".strip(),
        "" if figure.floor is None else f"{_format_number(figure.floor)} {figure.unit}".strip(),
        "" if figure.ratio is None else f"{figure.ratio:.2f} x",
        limit + ("" if figure.is_within_limit else "  EXCEEDED"),
    )


def _format_number(value: float) -> str:
    return f"{value:.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:.3g}"  # whole numbers


def format_table(figures: Iterable[Figure | Skipped | Failed]) -> str:
    """Return the table of the figures as Markdown."""
    lines = [HEADER, tuple("---" for _ in HEADER), *map(format_figure, figures)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )
