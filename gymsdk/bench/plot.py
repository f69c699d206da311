"""Draw the results of a benchmark: a row of diagrams per environment or shape, and a column per measurement."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gymsdk.bench.report import PERCENTILES, STAGES, BenchResult, LoadResult
from gymsdk.bench.stage import LOAD, POLICY
from gymsdk.bench.table import PERCENTILE_LABELS, STAGE_LABELS
from gymsdk.errors import UsageError
from gymsdk.working_folder import shorten_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".png", ".svg", ".pdf")
"""The suffixes of the files that can be drawn."""

STAGE_COLOURS = {
    "send": "#bdbdbd",
    "queue": "#7f7f7f",
    "reset": "#aec7e8",
    "model": "#1f77b4",
    "step": "#2ca02c",
    "verify": "#9467bd",
    "close": "#c5b0d5",
    "serialise": "#d62728",
    "server": "#ff7f0e",
    "client": "#ffbb78",
}

PERCENTILE_COLOURS = ("#9ecae1", "#4292c6", "#2171b5", "#08306b")

PROCESS_COLOURS = {LOAD: "#7f7f7f", POLICY: "#ff7f0e"}
SERVER_COLOURS = ("#1f77b4", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#17becf")

CELL_INCHES = (4.2, 3.5)
"""The width and height of one diagram."""

LEGEND_ENTRY_HEADROOM = 0.1
"""The height above the highest bar for each entry of the legend, relative to this bar."""

WIDE_RANGE = 8
"""The ratio of the highest to the lowest load from which the horizontal axis is logarithmic."""

MIN_SHOWN_PERCENT = 0.5
"""The share of the latency from which a stage is drawn; a thinner stage would only fill the legend."""

MILLISECONDS_PER_SECOND = 1000

COLUMNS_OF_ONE = 3
"""The number of columns for the diagrams of a single result."""


def check_target(path: Path) -> None:
    """Check, before a long measurement, that a plot can be written to *path*.

    Raises:
        UsageError: matplotlib is not installed, or *path* has no known suffix or is in no existing folder.
    """
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: `pip install 'gymsdk[plot]'`, or leave out --plot")
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"--plot {shorten_path(path)}: name a file that ends with {', '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise UsageError(f"--plot {path}: the folder {path.parent} does not exist")


def draw_results(results: Sequence[BenchResult], path: Path) -> None:
    """Draw *results* to the file at *path*."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows, columns = (2, COLUMNS_OF_ONE) if len(results) == 1 else (len(results), len(DIAGRAMS))
    figure = Figure(figsize=(columns * CELL_INCHES[0], rows * CELL_INCHES[1] + 0.5), layout="constrained")
    # Without `pyplot`, which would choose a backend with windows and keep every figure.
    FigureCanvasAgg(figure)
    cells = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, (result, draw) in zip(cells, ((result, draw) for result in results for draw in DIAGRAMS), strict=True):
        draw(axes, result.loads)
        if len(results) > 1:
            axes.set_title(f"{result.title}: {axes.get_title()}", fontsize=10)
    models_played = sorted({result.model for result in results})
    names = ", ".join(result.title for result in results)
    figure.suptitle(f"gymsdk bench {names}\nplayed by {' and '.join(models_played)}", fontsize=11)
    figure.savefig(path, dpi=110)


def _get_positions(loads: Sequence[LoadResult]) -> list[float]:
    """Return the position of each load on the horizontal axis: its requested rate, or its concurrency."""
    return [float(load.concurrency) if load.open_loop is None else load.open_loop.rate for load in loads]


def _finish(
    axes: Axes, loads: Sequence[LoadResult], *, title: str, unit: str, log: bool = False, headroom: float = 1.1
) -> None:
    """Set the title, the axes and the legend; *headroom* is the height of the diagram relative to its highest value."""
    positions = _get_positions(loads)
    axes.set(title=title, xlabel=_name_axis(loads), ylabel=unit)
    if len(set(positions)) > 1 and max(positions) >= WIDE_RANGE * min(positions):
        axes.set_xscale("log", base=2)
    axes.set_xticks(positions, [f"{position:g}" for position in positions])
    axes.minorticks_off()
    highest = axes.dataLim.y1
    is_drawn = math.isfinite(highest) and highest > 0
    if log and is_drawn:
        _use_log_scale(axes)
    else:
        axes.set_ylim(0, headroom * highest if is_drawn else 1)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=8)


def _name_axis(loads: Sequence[LoadResult]) -> str:
    return "requested rollouts per second" if any(load.open_loop for load in loads) else "concurrent rollouts"


def _use_log_scale(axes: Axes) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:,g}")


def _draw_throughput(axes: Axes, loads: Sequence[LoadResult]) -> None:
    positions = _get_positions(loads)
    loops = [load.open_loop for load in loads if load.open_loop is not None]
    if loops:
        offered = [loop.offered if loop.offered is not None else float("nan") for loop in loops]
        axes.plot(positions, offered, linestyle="--", marker=".", color="#7f7f7f", label="offered")
        achieved = [loop.achieved if loop.achieved is not None else float("nan") for loop in loops]
        axes.plot(positions, achieved, marker="o", label="achieved")
    else:
        axes.plot(positions, [load.rate for load in loads], marker="o")
    _finish(axes, loads, title="throughput", unit="rollouts per second")


def _draw_latency(axes: Axes, loads: Sequence[LoadResult]) -> None:
    drawn = [load for load in loads if load.latency is not None]
    for name, colour in zip(PERCENTILES, PERCENTILE_COLOURS, strict=True):
        values = [getattr(load.latency, name) for load in drawn]
        axes.plot(_get_positions(drawn), values, marker="o", color=colour, label=PERCENTILE_LABELS[name])
    _finish(axes, loads, title="latency", unit="ms", log=True)


def _choose_colours(names: Sequence[str]) -> dict[str, str]:
    others = [name for name in names if name not in PROCESS_COLOURS]
    return PROCESS_COLOURS | {name: SERVER_COLOURS[index % len(SERVER_COLOURS)] for index, name in enumerate(others)}


def _draw_bars(
    axes: Axes, columns: Sequence[Mapping[str, float]], labels: Mapping[str, str], colours: Mapping[str, str]
) -> None:
    """Draw one stacked bar per column; the loads are categories, because the widths of bars need even distances."""
    bases = [0.0] * len(columns)
    for name, label in labels.items():
        values = [column.get(name, 0.0) for column in columns]
        axes.bar(range(len(columns)), values, 0.65, bottom=bases, color=colours[name], label=label)
        bases = [bottom + value for bottom, value in zip(bases, values, strict=True)]


def _finish_bars(
    axes: Axes, loads: Sequence[LoadResult], *, title: str, unit: str, headroom: float | None = None
) -> None:
    labels = axes.get_legend_handles_labels()[1]
    _finish(axes, loads, title=title, unit=unit, headroom=headroom or 1.1 + LEGEND_ENTRY_HEADROOM * len(labels))
    # `_finish` may have chosen a logarithmic axis.
    axes.set_xscale("linear")
    axes.set_xticks(range(len(loads)), [f"{position:g}" for position in _get_positions(loads)])
    axes.set_xlim(-0.6, len(loads) - 0.4)
    if labels:
        axes.legend(fontsize=8, reverse=True, loc="upper left")


def _draw_cpu(axes: Axes, loads: Sequence[LoadResult]) -> None:
    names = list(dict.fromkeys(name for load in loads for name in load.cpu if name != LOAD))
    _draw_bars(axes, [load.cpu for load in loads], {name: name for name in [*names, LOAD]}, _choose_colours(names))
    _finish_bars(axes, loads, title="CPU per rollout", unit="ms")


def _draw_stages(axes: Axes, loads: Sequence[LoadResult]) -> None:
    columns = [_scale(load.stages) for load in loads]
    shown = [name for name in STAGES if any(column.get(name, 0.0) >= MIN_SHOWN_PERCENT for column in columns)]
    _draw_bars(axes, columns, {name: STAGE_LABELS[name] for name in shown}, STAGE_COLOURS)
    _finish_bars(axes, loads, title="where the time goes", unit="% of the mean latency", headroom=1.0)
    axes.set_ylim(0, 100)
    means = ["" if load.latency is None else f"\n{_format_milliseconds(load.latency.mean)}" for load in loads]
    ticks = [f"{position:g}{mean}" for position, mean in zip(_get_positions(loads), means, strict=True)]
    axes.set_xticks(range(len(loads)), ticks)
    axes.set_xlabel(f"{_name_axis(loads)}, and mean latency")
    if shown:
        axes.legend(fontsize=7, reverse=True, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _format_milliseconds(milliseconds: float) -> str:
    return f"{milliseconds:.3g} ms" if milliseconds < MILLISECONDS_PER_SECOND else f"{milliseconds / 1e3:.3g} s"


def _scale(stages: Mapping[str, float]) -> dict[str, float]:
    total = sum(stages.values()) or 1.0
    return {name: 100 * milliseconds / total for name, milliseconds in stages.items()}


def _draw_lag(axes: Axes, loads: Sequence[LoadResult]) -> None:
    names = list(dict.fromkeys(name for load in loads for name in load.loop_lag if name not in PROCESS_COLOURS))
    colours = _choose_colours(names)
    for name in names:
        drawn = [load for load in loads if name in load.loop_lag]
        for field, style, label in (("p50", ":", None), ("p99", "-", name), ("max", "--", None)):
            values = [getattr(load.loop_lag[name], field) for load in drawn]
            axes.plot(_get_positions(drawn), values, marker="o", linestyle=style, color=colours[name], label=label)
    _finish(axes, loads, title="event-loop lag: p50 (dotted), p99, max (dashed)", unit="ms", log=True)


def _draw_memory(axes: Axes, loads: Sequence[LoadResult]) -> None:
    names = list(dict.fromkeys(name for load in loads for name in load.memory))
    colours = _choose_colours(names)
    for name in names:
        drawn = [load for load in loads if name in load.memory]
        values = [load.memory[name].most for load in drawn]
        axes.plot(_get_positions(drawn), values, marker="o", color=colours[name], label=name)
    _finish(axes, loads, title="peak memory", unit="MB")


DIAGRAMS: tuple[Callable[[Axes, Sequence[LoadResult]], None], ...] = (
    _draw_throughput,
    _draw_latency,
    _draw_stages,
    _draw_cpu,
    _draw_lag,
    _draw_memory,
)
"""The diagrams of one result, in the order in which they are drawn."""
