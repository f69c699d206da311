"""The text of results."""

from __future__ import annotations

from gymsdk.bench.report import CostFactors, compute_latency, compute_stages
from gymsdk.bench.stage import LOAD
from gymsdk.bench.table import format_factors, format_table
from tests.bench.results import build_load, build_open_load, build_result


def find_row(text: str, heading: str, label: str) -> list[str]:
    """Return the cells of a row below a heading."""
    lines = text.splitlines()
    section = lines[lines.index(heading) + 1 :]
    return next(line for line in section if line.strip().startswith(label)).split()[len(label.split()) :]


def test_each_load_has_a_column() -> None:
    text = format_table(build_result(build_load(), build_load(concurrency=64, rate=1234.5)))
    assert text.splitlines()[2].split() == ["concurrency", "16", "64"]
    assert find_row(text, "rollouts per second", "from first request to last response") == ["100.0", "1,234.5"]
    assert find_row(text, "latency, ms", "p99.9") == ["4.0", "4.0"]
    assert find_row(text, "memory (PSS), MB", "servers peak") == ["95", "95"]
    assert find_row(text, "event-loop lag, ms", "servers max") == ["9.0", "9.0"]
    assert find_row(text, "mean time of a rollout, ms", "other in the server") == ["0.30", "0.30"]
    assert find_row(text, "per rollout", "kB from sums_simple_agent") == ["1.50", "1.50"]


def test_servers_that_do_not_keep_up_are_reported() -> None:
    text = format_table(build_result(build_open_load(50.0, 50.0), build_open_load(200.0, 120.0, delayed=7)))
    assert text.splitlines()[2].split() == ["arrivals", "per", "second", "50", "200"]
    offered, achieved = "offered (started by the load generator)", "achieved (completed by the servers)"
    assert find_row(text, "rollouts per second", offered) == ["50.0", "200.0"]
    assert find_row(text, "rollouts per second", achieved) == ["50.0", "120.0"]
    assert find_row(text, "rollouts per second", "the servers keep up") == ["yes", "NO"]
    assert "THE SERVERS DO NOT KEEP UP: with 200 rollouts offered per second, they complete 120.0" in text
    assert "with 200 per second, 7 rollouts waited to be sent because 4,096 were outstanding" in text
    assert "with 50 per second" not in text


def test_a_load_generator_at_its_limit_is_reported() -> None:
    busy = build_load(cpu_share={LOAD: 0.97})
    assert "with 16 at once, the load generator uses 97% of a CPU core" in format_table(build_result(busy))
    late = build_open_load(50.0, 50.0, late_p99=80.0)
    assert "sent 1 % of the rollouts more than 80 ms late" in format_table(build_result(late))
    assert "load generator" not in "".join(format_table(build_result(build_load())).splitlines()[-3:])


def test_shapes_are_compared_with_the_capacity_table() -> None:
    simple = build_result(build_load(), shape="simple")
    steps = build_result(build_load(rate=40.0, factors=CostFactors(cpu=4.2, rate=2.5, reference=5.0)), shape="steps:5")
    first, header, *rows = format_factors([simple, steps]).splitlines()
    assert (first, header.split()[0]) == ("cost of a rollout by shape", "shape")
    assert [" ".join(row.split()) for row in rows if row] == [
        "simple 16 at once 2.00 1.0 x 100.0 1.0 x 1.0 x",
        "steps:5 16 at once 2.00 4.2 x 40.0 2.5 x 5.0 x",
    ]


def test_percentiles_are_those_of_the_latencies() -> None:
    latency = compute_latency([number / 1000 for number in range(1, 2001)])
    assert latency is not None
    assert (latency.p50, latency.p90, latency.p99, latency.p999) == (1001.0, 1801.0, 1981.0, 1999.0)
    assert (latency.mean, latency.max) == (1000.5, 2000.0)
    assert compute_latency([]) is None


def test_the_stages_add_up_to_the_latency() -> None:
    stages = compute_stages(
        100.0, {"model": 40.0, "step": 10.0}, send=5.0, queue=6.0, admission=4.0, serialise=1.0, server=70.0
    )
    assert stages == {
        "send": 5.0,
        "queue": 10.0,
        "model": 40.0,
        "step": 10.0,
        "serialise": 1.0,
        "server": 13.0,
        "client": 21.0,
    }
    assert sum(stages.values()) == 100.0
