"""The diagrams of results."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from gymsdk.bench.plot import check_target, draw_results
from gymsdk.errors import UsageError
from tests.bench.results import build_load, build_open_load, build_result


def test_one_result_is_drawn_with_all_its_diagrams(tmp_path: Path) -> None:
    path = tmp_path / "load.svg"
    draw_results([build_result(build_load(), build_load(concurrency=256))], path)
    text = path.read_text()
    for title in (
        "throughput",
        "latency",
        "where the time goes",
        "CPU per rollout",
        "event-loop lag: p50 (dotted), p99, max (dashed)",
        "peak memory",
        "concurrent rollouts",
    ):
        assert f"<!-- {title} -->" in text


def test_an_open_loop_is_drawn_over_the_requested_rate(tmp_path: Path) -> None:
    path = tmp_path / "load.svg"
    draw_results([build_result(build_open_load(50.0, 50.0), build_open_load(100.0, 70.0))], path)
    text = path.read_text()
    assert all(f"<!-- {label} -->" in text for label in ("requested rollouts per second", "offered", "achieved"))


def test_several_results_and_loads_without_measurements_are_drawn(tmp_path: Path) -> None:
    bare = build_load(latency=None, loop_lag={}, stages={}, memory={}, cpu={})
    draw_results([build_result(build_load(), shape="simple"), build_result(bare)], tmp_path / "load.png")
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_drawn_is_rejected_before_the_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=r"name a file that ends with \.png, \.svg, \.pdf"):
        check_target(tmp_path / "load.jpg")
    with pytest.raises(UsageError, match="does not exist"):
        check_target(tmp_path / "no/load.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"needs matplotlib: `pip install 'gymsdk\[plot\]'`"):
        check_target(tmp_path / "load.png")
