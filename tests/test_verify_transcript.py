"""A second verification of a finished transcript gives the same reward."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from gymsdk import Environment, Task, play, responses
from gymsdk.episode import verify_transcript
from gymsdk.types import Budget, Episode, Item, Model

ENVIRONMENT = """
class Count(State):
    count: int = 0

@hookimpl
async def reset(task):
    return Reset(state=Count())

@hookimpl
async def step(action: Action, state: Count):
    if isinstance(action, Message):
        state.count += 1
        return Step(reward=0.5, done=True)
    if action.name == "pay":
        state.count += 1
        return Step(output="paid", reward=0.25)
    return None

async def pay() -> str:
    "Pay."

async def wait() -> str:
    "Wait."
    await asyncio.sleep(60)

@hookimpl
def tools():
    return [pay, wait]

@hookimpl
async def verify(task, state: Count):
    return Verdict(reward=float(state.count))
"""


class Policy:
    """A policy that returns the same response after *delay* seconds."""

    def __init__(self, *output: Item, status: responses.ResponseStatus = "completed", delay: float = 0.0) -> None:
        self._output = list(output)
        self._status = status
        self._delay = delay

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:
        await asyncio.sleep(self._delay)
        return responses.build_response(self._output, model="m", status=self._status, request=request)


PAY = responses.build_function_call("pay", {}, "c1")
WAIT = responses.build_function_call("wait", {}, "c2")
CASES = {
    "the calls of a truncated turn do not run": (
        Policy(responses.build_message("cut o"), status="incomplete"),
        Budget(),
        "tokens",
    ),
    "calls before the deadline run": (Policy(PAY, WAIT, delay=0.95), Budget(seconds=1.0), "deadline"),
    "calls beyond the budget do not run": (Policy(PAY, PAY | {"call_id": "c3"}), Budget(tools=1), "tools"),
    "every turn runs until the limit of turns": (Policy(PAY), Budget(turns=2), "turns"),
    "a reply ends the episode": (Policy(responses.build_message("done")), Budget(), "done"),
}


async def test_the_rewards_of_steps_are_summed_in_the_same_order(
    environment: Callable[..., Environment], policy: Callable[..., Model]
) -> None:
    paying = environment("""
import json

async def pay(amount: float) -> str:
    "Pay."
    return ""

@hookimpl
async def step(action: Action):
    return Step(output="", reward=json.loads(action.arguments)["amount"])

@hookimpl
def tools():
    return [pay]

@hookimpl
async def verify():
    return Verdict(reward=0.0)
""")
    calls = [responses.build_function_call("pay", {"amount": 0.1 * number}, f"c{number}") for number in (1, 2, 3)]
    task = {"responses_create_params": {"input": "Pay."}}
    rollout = await play(paying, policy(calls[:1], calls[1:]), task, budget=Budget(turns=2))
    assert rollout.response is not None, rollout.failure
    assert rollout.failure is None, rollout.failure
    items = rollout.response["output"]
    judged = await verify_transcript(paying, task, items, seed=0, ended="turns", seconds=5.0)
    assert rollout.reward == judged.reward == (0.1 + 0.2) + 0.1 * 3
    assert rollout.components == judged.components


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
async def test_verifying_a_transcript_again_gives_the_same_reward(
    environment: Callable[..., Environment], case: str
) -> None:
    policy, budget, ended = CASES[case]
    made = environment(ENVIRONMENT)
    rollout = await play(made, policy, Task.ask("go").row(), budget=budget)
    assert (rollout.outcome, rollout.ended) == ("scored", ended)
    assert rollout.response is not None
    items = rollout.response["output"]
    repeated = await verify_transcript(made, rollout.row, items, seed=rollout.seed, ended=ended, seconds=5)
    assert (repeated.reward, repeated.components) == (rollout.reward, rollout.components)
    if ended == "deadline":
        outputs = {item["call_id"]: item["output"] for item in items if "output" in item}
        assert (outputs, rollout.reward, rollout.components) == ({"c1": "paid"}, 1.25, {"verdict": 1.0, "steps": 0.25})
