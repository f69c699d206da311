"""The lines of `rollouts.jsonl` and `failures.jsonl`: their fields, and rollouts that are parsed from them."""

from __future__ import annotations

import json
from importlib.metadata import version

import pytest

from gymsdk import Rollout, Step, Verdict, hookimpl, jsonl, play
from gymsdk.environment import Environment
from gymsdk.line import StoredRollout, build_line, strip_results
from gymsdk.types import Budget, Failure


class DetailedVerdict(Verdict):
    """A verdict with additional fields."""

    extracted: str | None
    scores: tuple[int, ...] = (1,)


class GradedEnvironment:
    """An environment with step rewards and a verdict with additional fields."""

    def __init__(self, error=None) -> None:
        self.error = error

    @hookimpl
    def step(self):
        return Step(reward=0.25, done=True)

    @hookimpl
    def verify(self, transcript):
        if self.error:
            raise self.error
        return DetailedVerdict(reward=1.0, components={"right": 0.75, "brief": 0.25}, extracted=transcript.reply)


ROW = {"responses_create_params": {"input": "Hi", "temperature": 0.1}, "expected_answer": "4", "verifier_metadata": {}}


@pytest.fixture
async def rollout(policy):
    sampling = {"temperature": 0.9}
    return await play(
        Environment("grades", GradedEnvironment()), policy("4"), ROW, seed=5, repeat=1, id="3:1", sampling=sampling
    )


async def test_a_scored_line_holds_the_row_the_response_and_the_flat_verdict(rollout):
    line = json.loads(jsonl.dump_row(build_line(rollout, (3, 1))))
    gymsdk_fields = line.pop("gymsdk")
    response = line.pop("response")
    assert line == {
        "responses_create_params": {"input": [{"role": "user", "content": "Hi"}], "temperature": 0.9},
        "expected_answer": "4",
        "verifier_metadata": {},
        "extracted": "4",
        "scores": [1],
        "grader_timeout": False,
        "reward": 1.25,
        "reward_components": {"right": 0.75, "brief": 0.25, "steps": 0.25},
        "_ng_task_index": 3,
        "_ng_rollout_index": 1,
    }
    assert [item["type"] for item in response["output"]] == ["message"]
    assert {key: gymsdk_fields[key] for key in ("id", "environment", "seed", "outcome", "ended", "turns")} == {
        "id": "3:1",
        "environment": "grades",
        "seed": 5,
        "outcome": "scored",
        "ended": "done",
        "turns": 1,
    }


@pytest.mark.parametrize("rollout_id", ["", "run-7"])
async def test_gymsdks_own_fields_are_the_rollouts_fields_as_json(rollout, rollout_id):
    rollout = rollout.model_copy(update={"rollout_id": rollout_id})
    fields = build_line(rollout, (3, 1))["gymsdk"]
    assert (fields.pop("format"), fields.pop("version")) == (1, version("gymsdk"))
    included = {"id", "environment", "seed", "outcome", "ended", "turns", "usage", "timing"} | (
        {"rollout_id"} if rollout_id else set()
    )
    assert rollout.usage
    assert rollout.timing.turns
    assert fields == rollout.model_dump(mode="json", include=included) | {
        "attempts": 1,
        "step_rewards": [0.25],
        "verdict": ["grader_timeout", "extracted", "scores"],
    }


async def test_a_scored_line_can_be_read_back(rollout):
    line = build_line(rollout, (3, 1))
    parsed = StoredRollout(json.loads(jsonl.dump_row(line))).to_rollout()
    assert StoredRollout(line).key == (3, 1)
    assert (parsed.reward, parsed.components, parsed.repeat, parsed.seed) == (1.25, rollout.components, 1, 5)
    assert (parsed.usage, parsed.timing, parsed.opening) == (rollout.usage, rollout.timing, rollout.opening)
    assert parsed.verdict.model_dump() == rollout.verdict.model_dump(mode="json")
    assert parsed.response == rollout.response
    stored = json.loads(jsonl.dump_row(line))
    assert json.loads(jsonl.dump_row(build_line(StoredRollout(stored).to_rollout(), (3, 1)))) == stored
    assert build_line(rollout, (3, 1), attempts=2)["gymsdk"]["attempts"] == 2


async def test_a_line_has_the_offered_tools_and_nothing_of_an_earlier_run_or_of_components_that_are_missing(policy):
    def search(place: str): ...

    class NoComponents:
        @hookimpl
        def tools(self):
            return [search]

        @hookimpl
        def verify(self):
            return Verdict(reward=0.5)

    row = {**ROW, "reward": 9.0, "response": {}, "gymsdk": {}, "_ng_failure_class": "old", "mine": 1}
    line = build_line(await play(Environment("plain", NoComponents()), policy("4"), row), (0, 0))
    assert not {"reward_components", "_ng_failure_class"} & line.keys()
    assert (line["reward"], line["mine"]) == (0.5, 1)
    assert [tool["name"] for tool in line["responses_create_params"]["tools"]] == ["search"]


async def test_a_failed_line_describes_the_failure_and_has_no_reward(policy):
    rollout = await play(
        Environment("grades", GradedEnvironment(ValueError("no"))), policy("4"), ROW, budget=Budget(turns=1)
    )
    line = json.loads(jsonl.dump_row(build_line(rollout, (3, 1), attempts=2)))
    assert {key: value for key, value in line.items() if key.startswith("_ng_")} == {
        "_ng_failure_class": "hook_raised",
        "_ng_failure_stage": "verify",
        "_ng_failure_message": line["_ng_failure_message"],
        "_ng_failure_terminal": False,
        "_ng_attempt_index": 1,
        "_ng_task_index": 3,
        "_ng_rollout_index": 1,
    }
    assert line["_ng_failure_message"].startswith("hook 'verify' of environment 'grades' raised ValueError: no")
    assert "reward" not in line
    assert line["expected_answer"] == "4"
    assert line["response"]["output"]


@pytest.mark.parametrize(
    ("stage", "kind", "terminal"),
    [
        ("model", "model_refused", False),
        ("verify", "judge_failed", False),
        ("host", "host_broke", False),
        ("step", "threads_exhausted", False),
        ("step", "x", True),
        *(("verify", f"worker_{end}", True) for end in ("killed", "timeout", "start")),
        *(("step", f"worker_{end}", False) for end in ("killed", "timeout", "start")),
    ],
)
def test_a_failure_that_a_retry_cannot_fix_is_terminal(stage, kind, terminal):
    failure = Failure(stage=stage, kind=kind, message="", retryable=kind.startswith("worker"))
    rollout = Rollout(id="0:0", environment="grades", row=ROW, seed=0, outcome="failed", failure=failure)
    line = build_line(rollout, (0, 0), attempts=1)
    assert line["_ng_failure_terminal"] is terminal
    # It failed before its reset.
    assert (line["responses_create_params"], line["response"]) == (ROW["responses_create_params"], None)


async def test_strip_results_removes_the_verdict_of_an_earlier_run(rollout):
    row = {**build_line(rollout, (3, 1)), "_ng_failure_class": "old", "_ng_attempt_index": 2}
    assert strip_results(row) == {
        "responses_create_params": row["responses_create_params"],
        "expected_answer": "4",
        "verifier_metadata": {},
        "_ng_task_index": 3,
        "_ng_rollout_index": 1,
    }
    assert strip_results(row, keep={"extracted"})["extracted"] == "4"


@pytest.mark.parametrize("gymsdk_field", [None, 3, {}, {"verdict": None}, {"verdict": [["x"]]}])
def test_a_gymsdk_field_without_a_verdict_does_not_affect_the_other_fields(gymsdk_field):
    assert strip_results({**ROW, "gymsdk": gymsdk_field}) == ROW
