"""Format the results of a benchmark as text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel

from gymsdk.bench.report import PERCENTILES, BenchResult, CostFactors, LoadResult
from gymsdk.bench.stage import LOAD, SERVERS
from gymsdk.console import format_rows

STAGE_LABELS = {
    "send": "wait to be sent",
    "queue": "queue",
    "reset": "reset",
    "model": "model",
    "step": "tools (step)",
    "verify": "verify",
    "close": "close",
    "serialise": "serialise",
    "server": "other in the server",
    "client": "HTTP and client",
}

PERCENTILE_LABELS = {"p50": "p50", "p90": "p90", "p99": "p99", "p999": "p99.9"}

BUSY_SHARE = 0.9
"""The share of a CPU core above which the load generator may be the bottleneck."""

MAX_LATE_MILLISECONDS = 50.0
"""How late the load generator may send rollouts before the result says so."""


@dataclass(frozen=True, slots=True)
class Section:
    """Rows of a table under a heading. Each row has a label and, for each load, a text or `None`."""

    heading: str
    rows: Mapping[str, Sequence[str | None]]


def format_table(result: BenchResult) -> str:
    """Return a table with a column per load, followed by what is wrong with the loads."""
    sections = [section for section in _list_sections(result) if section.rows]
    rows = [row for section in sections for row in _list_cells(section)]
    table = format_rows(rows, align=">")
    return "\n".join([*_format_header(result), *table, *_list_problems(result.loads), ""])


def _format_header(result: BenchResult) -> Iterator[str]:
    yield f"{result.title}: played by {result.model or 'an unknown model'}"
    if result.ready is not None:
        memory = f"{result.ready_memory:.0f} MB of memory"
        yield f"ready in {result.ready:.2f} s ({result.ready_cpu:.2f} s of CPU), with {memory}"


def _list_cells(section: Section) -> Iterator[list[str]]:
    if section.heading:
        columns = len(next(iter(section.rows.values())))
        yield [section.heading, *[""] * columns]
    indent = "  " if section.heading else ""
    for label, texts in section.rows.items():
        yield [indent + label, *(text or "" for text in texts)]


def _list_sections(result: BenchResult) -> Iterator[Section]:
    loads = result.loads
    yield Section("", dict([_list_load_names(loads)]))
    yield Section("rollouts per second", dict(_list_rates(loads)))
    latencies = [None if load.latency is None else load.latency.model_dump() for load in loads]
    names = {**{name: PERCENTILE_LABELS[name] for name in PERCENTILES}, "mean": "mean", "max": "max"}
    yield Section("latency, ms", _tabulate(latencies, names, "{:,.1f}"))
    yield Section("mean time of a rollout, ms", _tabulate([load.stages for load in loads], STAGE_LABELS, "{:,.2f}"))
    yield Section("CPU per rollout, ms", _tabulate([load.cpu for load in loads], {}, "{:.2f}"))
    yield Section("CPU, cores", _tabulate([load.cpu_share for load in loads], {}, "{:.2f}"))
    memories, words = [load.memory for load in loads], {"before": "before", "peak": "most", "after": "after"}
    yield Section(f"memory ({result.memory_measure}), MB", dict(_list_by_process(memories, words, "{:,.0f}")))
    lags, words = [load.loop_lag for load in loads], {"p50": "p50", "p99": "p99", "max": "max"}
    yield Section("event-loop lag, ms", dict(_list_by_process(lags, words, "{:,.1f}")))
    yield Section("per rollout", dict(_list_counts(loads)))
    yield Section("cost relative to the shape simple", dict(_list_factors([load.factors for load in loads])))
    yield Section("results", dict(_list_outcomes(loads)))


def _tabulate(
    columns: Sequence[Mapping[str, float] | None], labels: Mapping[str, str], template: str
) -> dict[str, list[str | None]]:
    """Return a row for each key of *labels* or of the *columns* that has a value."""
    keys = dict.fromkeys([*labels, *(key for column in columns for key in column or {})])
    rows = {
        labels.get(key, key): [template.format(column[key]) if column and key in column else None for column in columns]
        for key in keys
    }
    return {label: cells for label, cells in rows.items() if any(cells)}


def _list_load_names(loads: Sequence[LoadResult]) -> tuple[str, list[str | None]]:
    """Return the first row: the rate or the concurrency of each load. All loads of a result are of one kind."""
    if any(load.open_loop for load in loads):
        return "arrivals per second", [f"{load.open_loop.rate:g}" for load in loads if load.open_loop]
    return "concurrency", [str(load.concurrency) for load in loads]


def _list_rates(loads: Sequence[LoadResult]) -> Iterator[tuple[str, list[str | None]]]:
    loops = [load.open_loop for load in loads if load.open_loop is not None]
    if loops:
        yield "offered (started by the load generator)", [_format_rate(loop.offered) for loop in loops]
        yield "achieved (completed by the servers)", [_format_rate(loop.achieved) for loop in loops]
        yield "the servers keep up", [{None: "unknown", True: "yes", False: "NO"}[loop.keeps_up] for loop in loops]
        yield "most rollouts outstanding", [f"{loop.most:,}" for loop in loops]
    yield "from first request to last response", [f"{load.rate:,.1f}" for load in loads]


def _format_rate(rate: float | None) -> str:
    return "unknown" if rate is None else f"{rate:,.1f}"


def _list_by_process(
    loads: Sequence[Mapping[str, BaseModel]], fields: Mapping[str, str], template: str
) -> Iterator[tuple[str, list[str | None]]]:
    """Yield a row for each process in *loads* and each of *fields*, which are named by the words of their rows."""
    for name in dict.fromkeys(name for load in loads for name in load):
        figures = [load.get(name) for load in loads]
        for word, field in fields.items():
            cells = [None if figure is None else template.format(getattr(figure, field)) for figure in figures]
            yield f"{name} {word}", cells


def _list_counts(loads: Sequence[LoadResult]) -> Iterator[tuple[str, list[str | None]]]:
    yield "model calls", [f"{load.calls:.2f}" for load in loads]
    for name in dict.fromkeys(name for load in loads for name in load.requests):
        yield f"requests to {name}", [f"{load.requests.get(name, 0.0):.2f}" for load in loads]
        traffic = [load.traffic.get(name) for load in loads]
        yield f"kB to {name}", [None if counts is None else f"{counts.received / 1e3:,.2f}" for counts in traffic]
        yield f"kB from {name}", [None if counts is None else f"{counts.sent / 1e3:,.2f}" for counts in traffic]


def _list_factors(factors: Sequence[CostFactors | None]) -> Iterator[tuple[str, list[str | None]]]:
    if not any(factors):
        return
    yield "CPU of the servers", [None if factor is None else _format_factor(factor.cpu) for factor in factors]
    yield "time per rollout", [None if factor is None else _format_factor(factor.rate) for factor in factors]
    yield (
        "capacity table of NeMo Gym",
        [None if factor is None else _format_factor(factor.reference) for factor in factors],
    )


def _format_factor(factor: float | None) -> str:
    return "" if factor is None else f"{factor:.1f} x"


def _list_outcomes(loads: Sequence[LoadResult]) -> Iterator[tuple[str, list[str | None]]]:
    yield "rollouts", [f"{load.rollouts:,}" for load in loads]
    yield "mean reward", [None if load.reward is None else f"{load.reward:.3f}" for load in loads]
    yield "rewards unlike the recording's", [None if load.wrong is None else f"{load.wrong:,}" for load in loads]
    for kind in dict.fromkeys(kind for load in loads for kind in load.failures):
        yield f"no reward: {kind}", [f"{load.failures.get(kind, 0):,}" for load in loads]
    yield "sessions and episodes left open", [f"{load.open:,}" for load in loads]


def _list_problems(loads: Sequence[LoadResult]) -> Iterator[str]:
    yield from dict.fromkeys(f"{kind}: {message}" for load in loads for kind, message in load.messages.items())
    for load in loads:
        yield from _describe_limits(load)
        if load.wrong and load.expected is not None and load.reward is not None:
            yield (
                f"WRONG REWARDS: with {_name_load(load)}, {load.wrong} of {load.rollouts} rewards"
                f" differ from the recording;"
                f" the mean is {load.reward:.4f}, expected {load.expected:.4f}"
            )
    if any(load.wrong is None for load in loads):
        yield "the rewards are not checked: name the scripted policy that the servers play with --model"


def _name_load(load: LoadResult) -> str:
    return f"{load.concurrency} at once" if load.open_loop is None else f"{load.open_loop.rate:g} per second"


def _describe_limits(load: LoadResult) -> Iterator[str]:
    """Say what limits a load: the servers, the bound on outstanding rollouts, or the load generator."""
    loop = load.open_loop
    if loop is not None and loop.keeps_up is False:
        yield (
            f"THE SERVERS DO NOT KEEP UP: with {loop.rate:g} rollouts offered per second, they complete"
            f" {loop.achieved:,.1f}; the latency grows as long as the load lasts"
        )
    if loop is not None and loop.delayed:
        yield (
            f"with {loop.rate:g} per second, {loop.delayed:,} rollouts waited to be sent because"
            f" {load.concurrency:,} were outstanding; their latency includes this wait"
        )
    if (share := load.cpu_share.get(LOAD, 0.0)) > BUSY_SHARE:
        yield (
            f"with {_name_load(load)}, the load generator uses {share:.0%} of a CPU core and may be the bottleneck;"
            " the servers may sustain more"
        )
    if loop is not None and loop.late_p99 > MAX_LATE_MILLISECONDS:
        yield (
            f"with {_name_load(load)}, the load generator sent 1 % of the rollouts more than {loop.late_p99:,.0f} ms"
            " late, because this machine is busy; their latency includes this delay"
        )


def format_factors(results: Sequence[BenchResult]) -> str:
    """Return a table that compares the shapes of rollouts, one line for each load of each shape."""
    shapes = [result for result in results if result.shape is not None]
    header = ["shape", "load", "CPU, ms", "factor", "per second", "factor", "NeMo Gym's table"]
    rows = [header, *(cells for result in shapes for cells in _list_factor_cells(result))]
    return "\n".join(["cost of a rollout by shape", *format_rows(rows, align=">"), ""])


def _list_factor_cells(result: BenchResult) -> Iterable[list[str]]:
    for load in result.loads:
        is_simple = load.factors is None and result.shape == "simple"
        factors = load.factors or (CostFactors(cpu=1.0, rate=1.0, reference=1.0) if is_simple else None)
        cells = ["", "", ""] if factors is None else map(_format_factor, (factors.cpu, factors.rate, factors.reference))
        cpu_factor, rate_factor, reference = cells
        cpu = sum(used for name, used in load.cpu.items() if name.startswith(SERVERS))
        yield [
            result.title,
            _name_load(load),
            f"{cpu:.2f}",
            cpu_factor,
            f"{load.rate:,.1f}",
            rate_factor,
            reference,
        ]
