"""Tests of the rewards of scripted policies against the claims."""

from __future__ import annotations

from itertools import islice

import pytest

import gymsdk
from gymsdk.types import Budget


async def rollouts(environment, model, split, number):
    policy = gymsdk.model(model)
    rows = list(islice(environment.tasks(split, seed=5), number))
    return [await gymsdk.play(environment, policy, row, seed=seed) for seed, row in enumerate(rows)]


@pytest.mark.slow
@pytest.mark.parametrize("split", ["train", "validation", "example"])
async def test_the_oracle_reaches_the_claimed_maximum(environment, split):
    for rollout in await rollouts(environment, "scripted/oracle", split, 60):
        claims = await environment.claims(environment.read(rollout.row))
        assert (rollout.reward, rollout.ended) == (claims.maximum, "done")


@pytest.mark.slow
@pytest.mark.parametrize("split", ["train", "validation", "example"])
@pytest.mark.parametrize("policy", ["null", "echo", "random"])
async def test_trivial_policies_earn_at_most_the_claimed_chance(environment, policy, split):
    for rollout in await rollouts(environment, f"scripted/{policy}", split, 60):
        claims = await environment.claims(environment.read(rollout.row))
        assert rollout.outcome == "scored"
        assert rollout.reward <= claims.chance <= 0.05


async def test_metrics_contain_the_mean_reward_by_kind_and_by_needed_calls(environment, weather_row):
    good = await rollouts(environment, "scripted/oracle", "example", 10)
    silent = await gymsdk.play(environment, gymsdk.model("scripted/null"), weather_row)
    figures = await environment.metrics([*good, silent])
    assert figures["kind=get_weather/mean/reward"] == 0.0
    assert figures[f"kind={good[0].row['kind']}/mean/reward"] == 1.0
    assert figures["calls=3/mean/reward"] == 1.0
    assert figures["overstepped"] == 0.0


async def test_metrics_accept_a_verdict_of_the_host(environment, weather_row):
    row = weather_row | {"kind": "sky"}
    rollout = await gymsdk.play(environment, gymsdk.model("scripted/oracle"), row)
    over_budget = rollout.model_copy(update={"reward": 0.0, "verdict": gymsdk.Verdict(reward=0.0, grader_timeout=True)})
    expected = {"kind=sky/mean/reward": 0.5, "calls=1/mean/reward": 1.0, "overstepped": 0.0}
    assert await environment.metrics([rollout, over_budget]) == expected
    assert await environment.metrics([over_budget.model_copy(update={"row": weather_row})]) == {}


async def test_the_oracle_makes_each_call_as_soon_as_its_references_are_known(environment):
    environment = gymsdk.load("tool_call", kinds=["broadcast"])
    (rollout,) = await rollouts(environment, "scripted/oracle", "example", 1)
    calls = [item["name"] for item in rollout.response["output"] if item["type"] == "function_call"]
    assert calls[:5] == ["find_contact", "find_contact", "get_weather", "send_message", "send_message"]
    assert rollout.turns == 3


async def test_the_oracle_makes_one_call_per_turn_if_the_row_forbids_parallel_calls(
    generate_row, play_with_policy, oracle
):
    row = generate_row(0).row()
    row["responses_create_params"]["parallel_tool_calls"] = False
    rollout, _ = await play_with_policy(row, oracle)
    assert (rollout.reward, rollout.turns) == (1.0, len(row["plan"]["calls"]) + 1)


async def test_a_truncated_episode_is_graded_on_its_changes(environment):
    row = next(row for row in environment.tasks("train") if row.kind == "tell_both" and len(row.plan.calls) == 4)
    rollout = await gymsdk.play(environment, gymsdk.model("scripted/oracle"), row, budget=Budget(turns=2))
    assert (rollout.ended, rollout.reward) == ("turns", 1.0)
