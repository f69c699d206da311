"""Every kind of wrong tool call gets an error output and never raises an exception."""

from __future__ import annotations

import json
import random

import pytest

from gymsdk import Environment, hookimpl, play, responses
from gymsdk.errors import BadRow
from gymsdk.models.scripted import build
from gymsdk.types import Budget

from .environments import Log, Notebook, note, notes, outputs


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (("nope", {}), "There is no tool named 'nope'."),
        (("note", "{what"), "Invalid tool call arguments: "),
        (("note", "[]"), "Invalid tool call arguments: note takes a JSON object"),
        (("note", {}), "Invalid tool call arguments for note: what: Field required"),
        (("note", {"what": 5}), "Invalid tool call arguments for note: what: Input should be a valid string"),
        (("note", {"what": "a", "state": 1}), "Invalid tool call arguments for note: state: Extra inputs"),
    ],
)
async def test_an_invalid_call_gets_an_error_output(notebook, policy, task, call, message):
    rollout = await play(Environment("notebook", notebook), policy([call], notes("a"), "done"), task)
    assert json.loads(outputs(rollout)[0])["error"].startswith(message)
    assert (rollout.outcome, rollout.reward) == ("scored", 1.0)


def unusual(
    state: Log,
    nested: list[dict[str, list[int]]],
    either: int | str | None,
    tags: set[str],
    pair: tuple[int, float] = (1, 2),
) -> str:
    return "ok"


class Spam:
    """A policy that calls random tools with random arguments, and sometimes replies."""

    NAMES = ("note", "unusual", "", "nope", "__class__", "\ud800", "note ")
    VALUES = (None, 0, -1, 10**30, 1.5, "", "\ud800", "x" * 999, [], [[]], {}, {"a": [1]}, True)
    TEXTS = ("", "{", "[1]", "null", '"a"', "NaN", '{"what": NaN}', "[" * 5000, "\ud800", '{"what": 1e999}')

    def __init__(self, seed) -> None:
        self.rng = random.Random(seed)

    def arguments(self):
        if self.rng.random() < 0.3:
            return self.rng.choice(self.TEXTS)
        keys = self.rng.sample(["what", "nested", "either", "tags", "pair", "state", "odd key"], self.rng.randint(0, 6))
        return json.dumps({key: self.rng.choice(self.VALUES) for key in keys})

    async def respond(self, request, *, episode=None):
        calls = [
            responses.build_function_call(
                self.rng.choice(self.NAMES), self.arguments(), self.rng.choice(["", "a", f"{self.rng}"])
            )
            for _ in range(self.rng.randint(1, 6))
        ]
        return responses.build_response([responses.build_message("hm"), *calls], model="spam")


@pytest.mark.parametrize("seed", range(8))
async def test_a_policy_that_spams_tools_never_breaks_the_host(task, seed):
    class Odd(Notebook):
        @hookimpl
        def tools(self):
            return [note, unusual]

    rollout = await play(Environment("odd", Odd()), Spam(seed), task, budget=Budget(turns=9, tools=40))
    assert rollout.outcome == "scored"
    assert rollout.ended in {"turns", "tools"}
    assert rollout.model_dump(mode="json")["response"]["output"]


async def test_a_row_with_unusual_tools_breaks_nothing(notebook):
    tools = [
        {"type": "function", "name": "note", "parameters": parameters}
        for parameters in (None, {}, {"type": "object", "properties": None}, {"anyOf": []}, {"enum": []}, {"type": []})
    ]
    row = {"responses_create_params": {"input": "?", "tools": [*tools, {"type": "web_search"}]}}
    for seed in range(20):
        rollout = await play(Environment("notebook", notebook), build("random"), row, seed=seed)
        assert rollout.outcome == "scored"


async def test_a_tool_without_a_name_does_not_fit_the_environment(notebook):
    row = {"responses_create_params": {"input": "?", "tools": [{"name": 5}]}}
    with pytest.raises(BadRow, match=r"`tools.0.name` must be a string"):
        await play(Environment("notebook", notebook), build("random"), row)
