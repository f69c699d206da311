"""Simple policies and canaries must not earn more than chance explains."""

from __future__ import annotations

import pytest

from gymsdk import Claims, Rollout, Task, responses
from gymsdk.checks.attack import Attempt, TaskView, build_text_attack, compute_hoeffding_bound, find_gain_beyond_chance
from gymsdk.checks.clues import fill_values, iter_enum_arguments, list_choices, list_letters, list_numbers, list_options
from gymsdk.checks.phases import sample_tasks, shorten_text

GUESSED = """
class Coin(Task):
    side: str

@hookimpl
def tasks(split: Literal["train", "validation", "test"], seed: int):
    rng = random.Random(f"{split}:{seed}")
    while True:
        yield Coin.ask(f"Toss {rng.random()}: yes or no?", side=rng.choice(["yes", "no"]))

@hookimpl
def solve(task: Coin):
    return Message(content=task.side)

@hookimpl
def verify(task: Coin, transcript):
    return Verdict(reward=float(transcript.reply == task.side))

@hookimpl
def claims():
    return Claims(chance=CHANCE)
"""


def attempts(*rewards: float, chance: float = 0.0, maximum: float = 1.0) -> list[Attempt]:
    attack = build_text_attack("says nothing", "")
    view = TaskView(Task.ask("?"), Claims(chance=chance, maximum=maximum), [], [])
    turns = [[responses.build_message("")]]
    return [
        Attempt(attack, view, turns, Rollout(id="", environment="", row={}, seed=0, outcome="scored", reward=reward))
        for reward in rewards
    ]


async def test_only_a_claimed_chance_may_be_earned(subject, outcome):
    guessed = subject(GUESSED.replace("CHANCE", "0.5"))
    assert (await outcome("semantic.floor_gap", guessed)).findings == []
    result = await outcome("semantic.floor_gap", subject(GUESSED.replace("CHANCE", "0.01")))
    assert "always takes the first option" in " ".join(finding.problem for finding in result.findings)


async def test_an_environment_without_tasks_is_skipped(subject, outcome):
    guessed = subject("@hookimpl\ndef verify():\n    return Verdict(reward=0.0)\n")
    assert [(await outcome(f"semantic.{check}", guessed)).status for check in ("floor_gap", "canary_floor")] == [
        "skipped",
        "skipped",
    ]


@pytest.mark.parametrize(
    ("rewards", "chance", "found"),
    [
        ([0.0] * 12, 0.0, False),
        ([0.0] * 11 + [1.0], 0.0, True),
        ([0.0] * 9 + [1.0] * 3, 0.02, False),
        ([0.0] * 8 + [1.0] * 4, 0.02, True),
        ([1.0] * 9 + [0.0] * 3, 0.5, False),
        ([0.1] * 8, 0.05, True),
        ([0.05] * 8, 0.05, False),
        ([1.0] * 4, 1.0, False),
        ([-1.0] * 12, 0.0, False),
    ],
)
def test_only_a_gain_beyond_chance_is_found(rewards, chance, found):
    assert bool(find_gain_beyond_chance(attempts(*rewards, chance=chance))) is found


def test_rewards_are_shares_of_the_maximum_and_a_mean_below_the_chance_is_no_gain():
    assert find_gain_beyond_chance(attempts(*[2.0] * 4, *[0.0] * 8, chance=1.0, maximum=10.0)) == []
    assert compute_hoeffding_bound(0.1, 0.2, 12) == 1.0


def test_attacks_take_values_from_the_prompt_and_from_schemas():
    prompt = "Pick:\nA) red\nB) blue\nor say 'green'. Is it hot or cold?"
    assert {"A", "red", "B", "blue", "green", "hot", "cold"} <= set(list_options(prompt))
    assert list_letters(prompt)[:2] == ["A", "B"]
    assert list_numbers("3 and -4.5, then 3") == ["3", "-4.5"]
    unit = {"type": "string", "enum": ["km", "mile"]}
    tool = {"parameters": {"properties": {"unit": unit, "many": {"type": ["integer", "null"]}}}}
    assert list(iter_enum_arguments(tool)) == [{"unit": "km", "many": 1}, {"unit": "mile", "many": 1}]
    for bounds, values in (
        ({"type": "boolean"}, [True, False]),
        ({"type": "integer", "minimum": 1, "maximum": 3}, [1, 2, 3]),
        ({"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 3}, [1, 2]),
        ({"type": "integer", "minimum": 1, "maximum": 1000}, []),
        ({"type": "integer", "minimum": 1}, []),
    ):
        assert list_choices(bounds) == values
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "number"}}, "b": {}}}
    assert fill_values(schema, {"number": 1e308, "string": "x"}) == {"a": [1e308], "b": "x"}
    assert sample_tasks(range(24), 4) == [0, 6, 12, 18]
    assert shorten_text("\u202e\ud800") == r"'\u202e\ud800'"
