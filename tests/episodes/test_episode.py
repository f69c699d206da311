"""The loop of an episode: the order of turns, budgets, and the contents of a rollout."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from pydantic import ValidationError

from gymsdk import Environment, Step, Task, hookimpl, play, responses
from gymsdk.responses import NOT_RUN_OUTPUT
from gymsdk.types import Budget

from .environments import Log, Notebook, Paying, Slow, notes, outputs


async def test_an_episode_runs_from_reset_through_turns_to_a_verdict(notebook, policy, task):
    model = policy(notes("a", "b"), notes("c"), "done")
    rollout = await play(Environment("notebook", notebook), model, task, seed=3, repeat=1, id="7:1")
    assert (rollout.outcome, rollout.reward, rollout.ended, rollout.turns) == ("scored", 3.0, "done", 3)
    assert (rollout.id, rollout.seed, rollout.repeat, rollout.environment) == ("7:1", 3, 1, "notebook")
    assert outputs(rollout) == ["noted a", "noted b", "noted c"]
    assert rollout.row == task.row()
    assert rollout.failure is None
    kinds = [item["type"] for item in rollout.response["output"]]
    calls, call_outputs = ["function_call"], ["function_call_output"]
    assert kinds == [*calls * 2, *call_outputs * 2, *calls, *call_outputs, "message"]
    assert rollout.usage["policy"].calls == 3
    assert rollout.response["usage"]["total_tokens"] == rollout.usage["policy"].total_tokens > 0
    assert notebook.closed == 1


async def test_milliseconds_are_recorded_per_stage_and_per_model_call(notebook, policy, task):
    rollout = await play(Environment("notebook", notebook), policy(notes("a"), "done"), task)
    assert list(rollout.timing.stages) == ["reset", "model", "step", "verify", "close"]
    assert len(rollout.timing.model_calls) == 2
    assert rollout.timing.total == pytest.approx(sum(rollout.timing.stages.values()), abs=0.01)
    starts, model, steps = zip(*rollout.timing.turns, strict=True)
    assert len(starts) == rollout.turns == 2
    assert starts[1] >= starts[0] + model[0] + steps[0] - 1
    assert sum(model) == pytest.approx(rollout.timing.stages["model"], abs=20)
    assert abs(time.time() - (rollout.timing.started or 0)) < 60


async def test_the_policy_receives_the_history_the_tools_and_the_rows_parameters(notebook):
    requests = []

    class RecordingModel:
        async def respond(self, request, *, episode=None):
            requests.append(request)
            return responses.build_response([responses.build_message("done")], model="keeps")

    params = {"input": "Hi", "temperature": 0.5, "top_p": None, "tool_choice": "auto"}
    environment, sampling = Environment("notebook", notebook), {"temperature": 1.0, "max_output_tokens": 9}
    await play(environment, RecordingModel(), {"responses_create_params": params}, sampling=sampling)
    assert requests[0].pop("tools")[0]["name"] == "note"
    assert requests[0] == {
        "input": [{"role": "user", "content": "Hi"}],
        "temperature": 1.0,
        "tool_choice": "auto",
        "max_output_tokens": 9,
    }
    # Tools without a name are not sent.
    row = {"responses_create_params": {"input": "Hi", "tools": [{"type": "web_search"}]}}
    await play(environment, RecordingModel(), row)
    assert "tools" not in requests[1]


async def test_messages_of_a_turns_steps_come_after_all_its_outputs(policy, task):
    rollout = await play(Environment("paying", Paying()), policy(notes("a", "b"), "stop"), task)
    texts = [item.get("output") or item["content"] for item in rollout.response["output"][2:6]]
    assert texts == ["heard a", "heard b", "next after a", "next after b"]


async def test_after_done_the_remaining_calls_of_a_turn_are_not_run(policy, task):
    plugin = Paying()
    rollout = await play(Environment("paying", plugin), policy(notes("a", "stop", "b")), task)
    assert outputs(rollout) == ["heard a", "heard stop", NOT_RUN_OUTPUT]
    assert (rollout.ended, rollout.reward) == ("done", 2.0 + 1.0)


async def test_step_rewards_are_a_component_of_the_reward(policy, task):
    rollout = await play(Environment("paying", Paying()), policy("go", "stop"), task)
    assert rollout.verdict.reward == 2.0
    assert rollout.reward == 3.0
    assert rollout.components == {"noted": 2.0, "steps": 1.0}


async def test_a_verdict_without_components_becomes_a_component_beside_the_steps(policy, task):
    class StepReward:
        @hookimpl
        def step(self):
            return Step(reward=0.25, done=True)

    rollout = await play(Environment("paid", StepReward()), policy("go"), task)
    assert (rollout.reward, rollout.components) == (0.25, {"verdict": 0.0, "steps": 0.25})


@pytest.mark.parametrize("output", [[], [responses.build_reasoning("hm")], [responses.build_message("")]])
async def test_a_turn_without_text_or_calls_ends_the_episode(notebook, policy, task, output):
    rollout = await play(Environment("notebook", notebook), policy(output), task)
    assert (rollout.outcome, rollout.ended, rollout.turns) == ("scored", "done", 1)


@pytest.mark.parametrize(
    ("calls", "budget", "ended", "reward", "turns"),
    [("a", {"turns": 3}, "turns", 3.0, 3), ("ab", {"tools": 3}, "tools", 3.0, 2), ("a", {"tools": 0}, "tools", 0.0, 1)],
)
async def test_an_episode_that_a_budget_ends_is_verified(notebook, policy, task, calls, budget, ended, reward, turns):
    rollout = await play(Environment("notebook", notebook), policy(notes(*calls)), task, budget=Budget(**budget))
    assert (rollout.ended, rollout.reward, rollout.turns) == (ended, reward, turns)
    if budget == {"tools": 3}:
        assert outputs(rollout) == ["noted a", "noted b", "noted a", NOT_RUN_OUTPUT]


@pytest.mark.parametrize("wrong", [{"turns": 0}, {"tools": -1}, {"seconds": 0}, {"steps": 3}])
def test_an_invalid_budget_is_rejected(wrong):
    with pytest.raises(ValidationError):
        Budget(**wrong)


@pytest.mark.slow
async def test_an_episode_fails_if_its_model_does_not_respond_by_the_deadline(notebook, task):
    model = Slow(responses.build_response([responses.build_function_call("note", {"what": "a"}, "c")], model="slow"))
    rollout = await play(Environment("notebook", notebook), model, task, budget=Budget(seconds=1))
    assert (rollout.outcome, rollout.reward, rollout.ended, rollout.turns) == ("failed", None, None, 1)
    failure = rollout.failure
    assert (failure.stage, failure.kind, failure.retryable) == ("model", "model_timeout", True)
    assert outputs(rollout) == ["noted a"]
    assert notebook.closed == 1


async def test_an_episode_without_any_response_is_not_verified(notebook, task):
    rollout = await play(Environment("notebook", notebook), Slow(None), task, budget=Budget(seconds=0.5))
    assert (rollout.outcome, rollout.reward, rollout.turns) == ("failed", None, 0)
    assert rollout.response is None


async def test_a_deadline_that_passed_in_a_step_is_noticed_before_the_next_turn(policy, task):
    class Late(Notebook):
        @hookimpl
        async def step(self):
            await asyncio.sleep(0.45)
            return Step(messages=["again"])

    rollout = await play(Environment("late", Late()), policy("a"), task, budget=Budget(seconds=0.5, turns=9))
    assert rollout.turns <= 2
    assert rollout.ended == "deadline" or rollout.failure.kind == "hook_timeout"


@pytest.mark.parametrize("fields", [{"status": "incomplete"}, {"incomplete_details": {"reason": "max_output_tokens"}}])
async def test_a_response_that_ran_out_of_tokens_is_verified_but_not_played(notebook, task, fields):
    class CutOff:
        async def respond(self, request, *, episode=None):
            return (
                responses.build_response([responses.build_function_call("note", '{"what": "a', "c")], model="cut")
                | fields
            )

    rollout = await play(Environment("notebook", notebook), CutOff(), task)
    assert (rollout.outcome, rollout.ended, rollout.reward) == ("scored", "tokens", 0.0)
    assert [item["type"] for item in rollout.response["output"]] == ["function_call"]


async def test_tools_receive_the_episode_arguments_that_they_name(policy, task):
    async def look(state: Log, task: Task, config, shared, where: str = "up"):
        return {"state": state, "asked": task.input[0]["content"], "config": config, "shared": shared, "where": where}

    class Looks(Notebook):
        @hookimpl
        def tools(self):
            return [look]

    rollout = await play(Environment("looks", Looks()), policy([("look", {"where": None})], "done"), task)
    assert json.loads(outputs(rollout)[0]) == {
        "state": {"done": []},
        "asked": "What is 40 + 2?",
        "config": {},
        "shared": None,
        "where": "up",
    }
