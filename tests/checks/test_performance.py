from __future__ import annotations

import pytest

from gymsdk.checks.performance import GARBAGE, Performance, Script, difference, plain, recorded, scripts, spread
from tests.checks.healthy import HEALTHY


async def test_a_performance_is_seen_phase_by_phase(subject):
    shelf = subject(HEALTHY)
    async with shelf.fresh() as environment:
        script = await recorded(shelf, environment, shelf.tasks[0], "oracle")
        performance = Performance(script, environment, shelf.budget)
        phases = [await performance.advance() for _ in range(5)]
    assert phases == ["reset", "turn 1", "turn 2", "verify", "close"]
    assert performance.over
    assert performance.seen["turn 1"]["state"] == {"books": [shelf.tasks[0].book]}
    assert performance.seen["verify"]["verdict"]["reward"] == 1.0


async def test_what_breaks_a_performance_is_part_of_it(subject):
    source = HEALTHY.replace("return Reset(state=Shelf())", "raise OSError('no shelf')")
    shelf = subject(source)
    async with shelf.fresh() as environment:
        seen = await Performance(Script("garbage", shelf.tasks[0], 0, GARBAGE), environment, shelf.budget).whole()
    assert seen == {"reset": {"failure": "hook_raised"}}


async def test_who_cannot_play_a_task_leaves_no_script(subject):
    shelf = subject(HEALTHY[: HEALTHY.rindex("@hookimpl")])
    async with shelf.fresh() as environment:
        assert await recorded(shelf, environment, shelf.tasks[0], "oracle") is None
        names = [script.name for script in await scripts(shelf, environment, tasks=2)]
    assert names == ["scripted/random", "scripted/random", "garbage"]


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [
        ({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]}, "a.1.b was 2, then 3"),
        ({"a": 1}, {"a": 1, "b": 2}, "b was None, then 2"),
        ([1], [1, 2], "it was [1], then [1, 2]"),
        (1.0, 1.0, None),
        ({"a": None}, {"a": None}, None),
    ],
)
def test_a_difference_says_where_and_how(one, other, found):
    assert difference(one, other) == found


def test_what_json_cannot_hold_is_named_by_its_type():
    assert plain({"x": object(), "y": float("nan")}) == {"x": "<object>", "y": "NaN"}


def test_tasks_are_taken_from_the_first_to_the_last():
    assert spread([*range(10)], 3) == [0, 3, 6]
    assert spread([1], 3) == [1]
