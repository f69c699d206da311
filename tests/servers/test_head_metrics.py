"""A head's metrics of its servers; the alert rules refer to existing metrics."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from gymsdk.cluster.reports import Exit, Service
from gymsdk.cluster.status import IDLE_UTILIZATION, RECENT_EXIT_SECONDS, SLOW_SECONDS
from gymsdk.deploy.node import NodeClient
from gymsdk.deploy.process import serve
from gymsdk.http import client as http
from gymsdk.observability import metrics
from gymsdk.observability.metrics import Sample, ServerMetrics, parse_samples

from .nodes import run_node, serve_head, wait_until

RULES = Path(__file__).parents[2] / "docs" / "prometheus-rules.yaml"
LAMP = Service(name="lamp", kind="resources_servers", implementation="lamp", port=9)


@pytest.fixture(autouse=True)
async def close_client():
    yield
    await http.aclose()


async def fetch_samples(url: str) -> list[tuple[str, dict[str, str], float]]:
    async with httpx.AsyncClient() as client:
        return parse_samples((await client.get(f"{url}/metrics")).text)


def rules() -> list[dict[str, Any]]:
    [group] = yaml.safe_load(RULES.read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


async def test_a_head_counts_expected_and_registered_servers():
    async with serve_head() as head_url:
        exits = {"lamp": Exit(code=-9, at=1000.5, restarts=2)}
        async with run_node(NodeClient(head_url, [LAMP], expected=["lamp", "bulb"], exits=lambda: exits)):
            found = {(name, labels.get("name")): value for name, labels, value in await fetch_samples(head_url)}
    assert (found["expected_servers", None], found["registered_servers", None]) == (2, 1)
    assert found["server_up", "lamp"] == 0
    assert ("round_trip_seconds", "lamp") not in found
    assert (found["last_exit_code", "lamp"], found["restarts", "lamp"]) == (-9, 2)
    assert found["last_exit_time_seconds", "lamp"] == 1000.5


async def test_the_alert_of_an_exit_sees_the_abnormal_one_of_several():
    well, wrong = {"lamp": Exit(code=0, at=2000, restarts=1)}, {"lamp": Exit(code=-9, at=1000, restarts=1)}
    async with serve_head() as head_url:
        supervisors = [
            NodeClient(head_url, exits=lambda each=each: each, supervisor=str(each)) for each in (wrong, well)
        ]
        async with run_node(supervisors[0]), run_node(supervisors[1]):
            found = {
                name: value for name, labels, value in await fetch_samples(head_url) if labels.get("name") == "lamp"
            }
    assert (found["last_exit_code"], found["last_exit_time_seconds"]) == (-9, 1000)


async def test_a_head_counts_lost_nodes():
    async def fetch_lost() -> float:
        return {name: value for name, _, value in await fetch_samples(head_url)}["lost_nodes"]

    async with serve_head() as head_url:
        one = NodeClient(head_url, [LAMP], lease=0.2)
        await one.join()
        await wait_until(fetch_lost)
        async with run_node(NodeClient(head_url, [LAMP.model_copy(update={"id": "0" * 12})])):
            assert await fetch_lost() == 0


async def test_a_head_reports_the_round_trips_of_its_servers(installed):
    installed()
    async with serve(["sums"]) as running:
        found = await fetch_samples(running.head_url)
    trips = {labels["name"]: value for name, labels, value in found if name == "round_trip_seconds"}
    assert trips.keys() == running.urls.keys()
    assert all(0 < each < 60 for each in trips.values())


@pytest.mark.slow
async def test_the_alert_rules_use_existing_metrics(installed, monkeypatch, tmp_path):
    installed()
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho '0, 37'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=":")
    exits = {"lamp": Exit(code=1, at=0, restarts=1)}
    async with serve(["sums"]) as running, run_node(NodeClient(running.head_url, [LAMP], exits=lambda: exits)):
        urls = [running.head_url, *running.urls.values()]
        existing = {
            f"gymsdk_{name}" for found in await asyncio.gather(*map(fetch_samples, urls)) for name, _, _ in found
        }
    named = {name for each in rules() for name in re.findall(r"gymsdk_\w+", each["expr"])}
    assert len(named) == 8
    assert named <= existing


def test_the_alert_rules_use_the_thresholds_of_the_status():
    by_name = {each["alert"]: each["expr"] for each in rules()}
    assert by_name["GymsdkRoundTripSlow"].endswith(f"> {SLOW_SECONDS}")
    assert by_name["GymsdkGpuIdle"].endswith(f"< {IDLE_UTILIZATION}")
    assert f"< {RECENT_EXIT_SECONDS:g})" in by_name["GymsdkServerExited"]
    assert all(each["annotations"].keys() == {"summary", "description"} for each in rules())


def test_a_gpu_without_a_value_is_left_out():
    output = "0, 93\n1, [N/A]\n2, 0\n\nNo devices were found\n"
    assert metrics.parse_utilization(output) == [Sample(0.93, {"gpu": "0"}), Sample(0.0, {"gpu": "2"})]


def test_a_machine_without_nvidia_smi_has_no_gpu_metric(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    metrics_of_lamp = ServerMetrics("lamp")
    metrics.add_gpu_metrics(metrics_of_lamp)
    assert not metrics_of_lamp.updates


@pytest.mark.parametrize("script", ["exit 3", "echo nonsense", "echo '0, 10'; exit 9"])
async def test_a_failing_nvidia_smi_gives_no_value(monkeypatch, tmp_path, script):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    metrics_of_lamp = ServerMetrics("lamp")
    metrics.add_gpu_metrics(metrics_of_lamp)
    assert "gpu_utilization_ratio{" not in await metrics_of_lamp.render_current()


def test_a_label_is_escaped():
    metrics_of_lamp = ServerMetrics("lamp")
    metrics_of_lamp.add_gauge("odd", "An odd name.", lambda: [Sample(1.0, {"name": 'a"b\\c\nd'})])
    assert r'gymsdk_odd{name="a\"b\\c\nd",server="lamp"} 1.0' in metrics_of_lamp.render()
    assert ("odd", {"name": 'a"b\\c\nd', "server": "lamp"}, 1.0) in parse_samples(metrics_of_lamp.render())


@pytest.mark.parametrize("text", ["", "{}", "<html>It works!</html>", 'gymsdk_x{a="b', "gymsdk_x one"])
def test_text_that_is_no_metrics_has_no_samples(text):
    assert parse_samples(text) == []
