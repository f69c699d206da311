"""Tests of whole episodes: rewards of policies, outputs of tools, and metrics."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

import pytest

import gymsdk
from gymsdk import Environment, Message, Rollout, ToolCall, Verdict


@pytest.fixture(scope="module")
def environment() -> Environment:
    return gymsdk.load("multineedle")


async def play_rows(environment: Environment, model: str, split: str, number: int) -> list[Rollout]:
    policy = gymsdk.model(model)
    rows = islice(environment.tasks(split), number)
    return [await gymsdk.play(environment, policy, row, seed=seed) for seed, row in enumerate(rows)]


@pytest.mark.parametrize("split", ["train", "validation", "example"])
async def test_the_oracle_reaches_the_claimed_maximum(environment, split):
    for rollout in await play_rows(environment, "scripted/oracle", split, 40):
        claims = await environment.claims(environment.read(rollout.row))
        assert (rollout.reward, rollout.ended) == (claims.maximum, "done")


@pytest.mark.parametrize("split", ["train", "validation", "example"])
@pytest.mark.parametrize("policy", ["null", "echo", "random"])
async def test_trivial_policies_earn_at_most_the_claimed_chance(environment, policy, split):
    for rollout in await play_rows(environment, f"scripted/{policy}", split, 40):
        claims = await environment.claims(environment.read(rollout.row))
        assert rollout.outcome == "scored"
        assert rollout.reward <= claims.chance == 0.0


async def test_the_oracle_makes_one_call_per_turn_and_ends_with_a_reply(environment):
    (rollout,) = await play_rows(environment, "scripted/oracle", "example", 1)
    needles = rollout.row["expected_synonyms"]
    assert rollout.response is not None
    output = rollout.response["output"]
    calls = [(item["name"], json.loads(item["arguments"])) for item in output if item["type"] == "function_call"]
    lookups = [("get_synonym_value", {"synonym": needle}) for needle in needles]
    extraction = {"synonym_values": rollout.row["expected_synonym_values"]}
    assert calls == [*lookups, ("extract_synonym_values", extraction)]
    assert rollout.turns == len(needles) + 2
    answers = [json.loads(item["output"]) for item in output if item["type"] == "function_call_output"]
    values = [{"synonym_value": value} for value in rollout.row["expected_synonym_values"]]
    assert answers == [*values, {"success": True}]


async def test_the_oracle_corrects_a_wrong_extraction(environment):
    episode = await environment.reset(next(environment.tasks("example")))
    lookups = [("get_synonym_value", json.dumps({"synonym": needle})) for needle in episode.row["expected_synonyms"]]
    episode.transcript.items = [
        {"type": "function_call", "name": name, "arguments": arguments, "call_id": "c"}
        for name, arguments in [*lookups, ("extract_synonym_values", "{")]
    ]
    (call,) = await environment.solve(episode) or []
    assert isinstance(call, ToolCall)
    assert call.parsed() == {"synonym_values": episode.row["expected_synonym_values"]}


async def call_tool(environment: Environment, name: str, arguments: Any) -> Any:
    episode = await environment.reset(next(environment.tasks("example")))
    step = await environment.step(episode, ToolCall(name=name, arguments=arguments))
    assert not step.done
    return json.loads(str(step.output))


@pytest.mark.parametrize(("word", "worth"), [("Blazing", 711), ("Warm", 407), ("", 0), ("é🦊", 233 + 129_418)])
async def test_the_value_of_a_synonym_is_the_sum_of_its_code_points(environment, word, worth):
    assert await call_tool(environment, "get_synonym_value", {"synonym": word}) == {"synonym_value": worth}


@pytest.mark.parametrize("values", [[711, 407], [], [-1]])
async def test_any_list_of_integers_is_accepted_without_a_hint(environment, values):
    assert await call_tool(environment, "extract_synonym_values", {"synonym_values": values}) == {"success": True}


@pytest.mark.parametrize("arguments", ["{", "{}", '{"synonym_values": 3}', '{"synonym_values": ["x"]}', "[]"])
async def test_malformed_arguments_return_an_error(environment, arguments):
    assert "error" in await call_tool(environment, "extract_synonym_values", arguments)


async def test_only_a_reply_ends_the_episode(environment):
    episode = await environment.reset(next(environment.tasks("example")))
    assert (await environment.step(episode, Message(content="Done."))).done


def test_the_tools_are_offered_under_their_published_names_with_strict_schemas(environment):
    schemas = {name: tool.schema for name, tool in environment.tools.items()}
    assert list(schemas) == ["get_synonym_value", "extract_synonym_values"]
    assert schemas["get_synonym_value"]["parameters"]["properties"]["synonym"]["type"] == "string"
    values = schemas["extract_synonym_values"]["parameters"]["properties"]["synonym_values"]
    assert (values["type"], values["items"]) == ("array", {"type": "integer"})
    assert all(schema["strict"] for schema in schemas.values())


async def test_metrics_are_the_mean_reward_by_number_of_needles(environment):
    right = await play_rows(environment, "scripted/oracle", "validation", 6)
    wrong = await play_rows(environment, "scripted/null", "validation", 6)
    needles = {len(rollout.row["expected_synonyms"]) for rollout in right}
    assert await environment.metrics(right + wrong) == {f"needles={n}/mean/reward": 0.5 for n in needles}


async def test_metrics_accept_a_verdict_of_the_host(environment):
    (rollout,) = await play_rows(environment, "scripted/oracle", "example", 1)
    over_budget = rollout.model_copy(update={"reward": 0.0, "verdict": Verdict(reward=0.0, grader_timeout=True)})
    needles = len(rollout.row["expected_synonyms"])
    assert await environment.metrics([rollout, over_budget]) == {f"needles={needles}/mean/reward": 0.5}


async def test_metrics_are_empty_without_rollouts(environment):
    assert await environment.metrics([]) == {}
