"""The shapes of rollouts that a benchmark compares."""

from __future__ import annotations

from pathlib import Path

import pytest

import gymsdk
from gymsdk.bench import shapes
from gymsdk.bench.recording import record_rollouts
from gymsdk.bench.shapes import Shape, parse_shapes
from gymsdk.bench.stage import LOAD, SERVERS
from gymsdk.bench.usage import name_children
from gymsdk.errors import UsageError
from gymsdk.plugins import registry
from tests.bench.results import build_load, build_open_load, build_result


@pytest.mark.parametrize(
    ("text", "model_calls", "tool_calls", "user_turns"),
    [("simple", 1, 0, 1), ("steps:5", 6, 5, 1), ("steps:1", 2, 1, 1), ("turns:10", 10, 0, 10), ("turns:1", 1, 0, 1)],
)
async def test_a_rollout_has_its_shape(text: str, model_calls: int, tool_calls: int, user_turns: int) -> None:
    [shape] = parse_shapes(text)
    environment = shapes.build_environment(shape)
    recording = await record_rollouts(environment, gymsdk.model("scripted/oracle"), split=None, limit=3)
    assert recording.rewards == (1.0, 1.0, 1.0)
    for line in recording.lines:
        output = line["response"]["output"]
        calls = [item for item in output if item["type"] == "function_call"]
        users = [item for item in output if item.get("role") == "user"]
        assert (line["gymsdk"]["turns"], len(calls), len(users) + 1) == (model_calls, tool_calls, user_turns)


@pytest.mark.parametrize("model", ["scripted/null", "scripted/oracle:0"])
async def test_a_wrong_reply_has_no_reward(model: str) -> None:
    environment = shapes.build_environment(Shape("steps:2"))
    recording = await record_rollouts(environment, gymsdk.model(model), split=None, limit=2)
    assert recording.rewards == (0.0, 0.0)


@pytest.mark.parametrize("text", ["", "simple,", "steps", "steps:0", "turns:-1", "steps:x", "loops:3", "steps:10000"])
def test_an_unknown_shape_is_rejected(text: str) -> None:
    with pytest.raises(UsageError, match="is not a shape; write simple, steps:N or turns:N"):
        parse_shapes(text)


def test_shapes_are_measured_once_each() -> None:
    assert parse_shapes("steps:5, simple,steps:5") == (Shape("steps:5"), Shape("simple"))


def test_the_environment_is_only_installed_where_a_benchmark_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shapes.ENVIRONMENT not in registry.installed()
    monkeypatch.syspath_prepend(shapes.install(tmp_path / "site"))
    assert registry.load(shapes.ENVIRONMENT, shape="turns:2").config.shape == "turns:2"


def test_the_factors_compare_the_same_load_of_simple() -> None:
    simple = build_result(build_load(), build_load(concurrency=64, rate=200.0), shape="simple")
    cpu = {SERVERS: 7.0, name_children(SERVERS): 1.0, LOAD: 9.0}
    steps = build_result(
        build_load(cpu=cpu, rate=25.0), build_load(concurrency=64, cpu=cpu, rate=40.0), shape="steps:5"
    )
    one, other = (load.factors for load in shapes.add_factors(steps, Shape("steps:5"), simple).loads)
    assert one is not None
    assert (one.cpu, one.rate, one.reference) == (4.0, 4.0, 5.0)
    assert other is not None
    assert (other.cpu, other.rate, other.reference) == (4.0, 5.0, 5.0)


def test_at_a_given_rate_only_the_cpu_is_compared() -> None:
    simple = build_result(build_open_load(10.0, 10.0), shape="simple")
    turns = build_result(build_open_load(10.0, 10.0), shape="turns:7")
    [load] = shapes.add_factors(turns, Shape("turns:7"), simple).loads
    assert load.factors is not None
    assert (load.factors.cpu, load.factors.rate, load.factors.reference) == (1.0, None, None)
