"""An invalid verdict fails its episode in the same way in process, in Gymnasium and over HTTP."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from gymsdk import Environment, Step, Task, Verdict, hookimpl, play, responses
from gymsdk.episode import verify_transcript
from gymsdk.errors import EpisodeError
from gymsdk.gym.env import Env
from gymsdk.gym.vector import VectorEnv
from gymsdk.servers import agent, resources
from gymsdk.servers import environment as environment_server

from .app_helpers import app_client

ROW = Task.ask("go").row()
RESPONSE = responses.build_response([responses.build_message("42")], model="m")
EPISODE = {
    "episode_id": {"rollout_id": "r1", "attempt": 0},
    "task": {"task_id": {"taskset": "t", "task_id": 1}, "task_input": ROW},
}


class VerdictWithObject(Verdict):
    value: Any = None


class OpenVerdict(Verdict, extra="allow"):
    """A verdict that accepts any field."""


class PreparedVerdict:
    """An environment that rewards a reply with *paid* and returns a prepared verdict."""

    def __init__(self, verdict: Callable[[], Verdict], paid: float) -> None:
        self._verdict = verdict
        self._paid = paid

    @hookimpl
    def step(self) -> Step:
        return Step(reward=self._paid, done=True)

    @hookimpl
    def verify(self) -> Verdict:
        return self._verdict()


CASES: dict[str, tuple[Callable[[], Verdict], float, str]] = {
    "a reward of the wrong type": (lambda: Verdict.model_construct(reward="high"), 0.0, "bad_answer"),
    "no reward": (Verdict.model_construct, 0.0, "bad_answer"),
    "no components": (lambda: Verdict(reward=1.0).model_copy(update={"components": None}), 0.0, "bad_answer"),
    "an object in a field": (lambda: VerdictWithObject(reward=1.0, value=object()), 0.0, "bad_answer"),
    "bytes in a field": (lambda: VerdictWithObject(reward=1.0, value=b"\xff"), 0.0, "bad_answer"),
    "a field of the line": (lambda: OpenVerdict(reward=1.0, response="mine"), 0.0, "bad_answer"),  # type: ignore[call-arg]  # the model accepts any field
    "a sum that is not finite": (lambda: Verdict(reward=1.5e308), 1.5e308, "not_finite"),
}


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize("case", CASES)
async def test_an_invalid_verdict_fails_its_episode(case, policy):
    verdict, paid, kind = CASES[case]
    environment = Environment("judges", PreparedVerdict(verdict, paid))

    rollout = await play(environment, policy("42"), ROW)
    assert (rollout.outcome, rollout.reward) == ("failed", None)
    assert (rollout.failure.stage, rollout.failure.kind, rollout.failure.retryable) == ("verify", kind, False)

    with pytest.raises(EpisodeError) as caught:
        await verify_transcript(environment, ROW, RESPONSE["output"], seed=0, ended="done", seconds=5)
    assert (caught.value.stage, caught.value.kind) == ("verify", kind)

    for app, path, body in (
        (agent.create_app(environment, policy("42")), "/run", ROW),
        (resources.create_app(environment), "/verify", ROW | {"response": RESPONSE}),
    ):
        async with app_client(app) as client:
            answer = await client.post(path, json=body)
        result = answer.json()
        assert (answer.status_code, result["stage"], result["kind"], "reward" in result) == (422, "verify", kind, False)

    async with app_client(environment_server.create_app(environment, policy("42"))) as client:
        flat = await client.post("/run", json=ROW)
        result = flat.json()
        assert (flat.status_code, result["failure_kind"], "reward" in result) == (200, f"gymsdk:{kind}", False)
        assert (result["_ng_failure_stage"], result["_ng_failure_terminal"]) == ("verification", True)
        failure = (await client.post("/run", json=EPISODE)).json()["failure"]
    assert (failure["failure_kind"], failure["stage"]) == (f"gymsdk:{kind}", "verification")

    async with app_client(resources.create_app(environment)) as client:
        await client.post("/reset", json=ROW)
        answer = await client.post("/step", json={"response": RESPONSE})
    assert (answer.status_code, answer.json()["kind"]) == (422, kind)

    env = Env(environment, tasks=[ROW])
    env.reset()
    _, reward, terminated, truncated, info = env.step("42")
    env.close()
    assert (math.isnan(reward), terminated, truncated, info["failure"]["kind"]) == (True, False, True, kind)

    many = VectorEnv(environment, num_envs=2, tasks=[ROW])
    many.reset()
    _, rewards, _, truncations, infos = many.step(["42", "42"])
    many.close()
    assert (all(map(math.isnan, rewards)), truncations.all(), *infos["failure"]["kind"]) == (True, True, kind, kind)


async def test_a_reply_with_a_number_as_content_does_not_fail_the_server(counter):
    class Numeric:
        async def respond(self, request: dict[str, Any], *, episode: object = None) -> dict[str, Any]:
            return responses.build_response([responses.build_message("5") | {"content": 5}], model="m", request=request)

    row = Task.ask("add", initial_count=1, expected_count=1).row()
    async with app_client(agent.create_app(counter(), Numeric())) as client:
        answer = await client.post("/run", json=row)
    assert (answer.status_code, answer.json()["kind"], answer.json()["retryable"]) == (422, "model_bad_answer", False)
