"""Tests of the generator: splits, seeds and settings."""

from __future__ import annotations

import json
from itertools import islice

import pytest

import gymsdk
from gym_env_tool_call.generator import SIZES, ToolCallConfig, requests
from gym_env_tool_call.oracle import get_plan
from gym_env_tool_call.requests import KINDS
from gymsdk import UsageError


def user_message(row):
    return row.responses_create_params["input"][1]["content"]


@pytest.mark.slow
def test_the_same_seed_gives_the_same_rows(environment):
    one, two = (list(islice(environment.tasks("train", seed=7), 20)) for _ in range(2))
    assert one == two
    assert one != list(islice(environment.tasks("train", seed=8), 20))


@pytest.mark.slow
def test_validation_has_300_rows_and_example_10_all_different(environment):
    for split, size in [("validation", 300), ("example", 10)]:
        rows = [json.dumps(row.row()) for row in environment.tasks(split)]
        assert len(set(rows)) == len(rows) == size


@pytest.mark.slow
def test_no_two_splits_share_a_request(environment):
    splits = [
        {user_message(row) for row in islice(environment.tasks(split, seed=1), 400)} for split in environment.splits
    ]
    assert [bool(one & two) for one in splits for two in splits if one is not two] == [False] * 6


@pytest.mark.slow
def test_every_kind_needs_its_declared_number_of_calls():
    for kind in KINDS.values():
        environment = gymsdk.load("tool_call", kinds=[kind.name], calls=[kind.calls, kind.calls])
        for row in islice(environment.tasks("train"), 5):
            assert (row.kind, len(get_plan(row).calls)) == (kind.name, kind.calls)


def test_the_calls_setting_limits_the_number_of_needed_calls():
    environment = gymsdk.load("tool_call", calls=[2, 3])
    assert {len(row.plan.calls) for row in islice(environment.tasks("train"), 60)} == {2, 3}


@pytest.mark.slow
def test_default_settings_generate_every_number_of_calls(environment):
    assert {len(row.plan.calls) for row in islice(environment.tasks("train"), 100)} == set(range(6))


def test_settings_accept_the_notation_of_the_command_line():
    environment = gymsdk.load("tool_call", calls="1,2", kinds="weather, exchange")
    assert {row.kind for row in islice(environment.tasks("train"), 20)} == {"weather", "exchange"}


async def test_distractors_limit_the_offered_tools():
    environment = gymsdk.load("tool_call", distractors=2)
    for row in islice(environment.tasks("train"), 10):
        needed = {call.name for call in row.plan.calls}
        offered = {tool["name"] for tool in (await environment.reset(row)).tools}
        assert needed <= offered
        assert len(offered) == len(needed) + 2


async def test_without_distractors_all_tools_are_offered(environment, generate_row):
    assert len((await environment.reset(generate_row(0))).tools) == 14


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kinds": ["wether"]}, "no kind of request is named 'wether'"),
        ({"kinds": ["weather"], "calls": [4, 5]}, "no request of these kinds needs 4 to 5 calls"),
        ({"calls": [7, 9]}, "no request needs 7 to 9 calls"),
        ({"distractors": -1}, "greater than or equal to 0"),
    ],
)
def test_invalid_settings_are_rejected(settings, words):
    with pytest.raises(UsageError, match=words):
        gymsdk.load("tool_call", **settings)


def test_the_generator_replaces_a_kind_without_a_text_in_the_split():
    # The first kind drawn here has nine texts, and none of these texts belongs to the split.
    assert len(list(requests("example", 4, ToolCallConfig()))) == SIZES["example"]


@pytest.mark.slow
def test_a_split_without_possible_requests_is_rejected():
    with pytest.raises(UsageError, match="split 'example' has no request of such kinds and calls"):
        next(requests("example", 0, ToolCallConfig(kinds=("forget",), calls=(1, 1))))
