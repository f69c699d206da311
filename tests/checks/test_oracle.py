"""The rewards of the oracle and of the claimed variants."""

from __future__ import annotations

import pytest

ADDED = """
@hookimpl
def tasks(split: Literal["train"], seed: int):
    for number in range(20):
        yield Task.ask(f"{number} + 100?", total=number + 100)

@hookimpl
def verify(task, transcript, state):
    right = transcript.reply in (str(task.total), f"{task.total}.0")
    return Verdict(reward=float(right))
"""
SOLVED = """
@hookimpl
def solve(task):
    return Message(content=str(task.total))
"""
CLAIMED = """
@hookimpl
def claims(task):
    return Claims({})
"""
UNEQUAL = """
@hookimpl
def verify(transcript):
    return Verdict(reward=1.0, components={"a": 0.25})
"""
PAID = """
@hookimpl
def step(action):
    return Step(reward=0.5, done=True)
"""


@pytest.mark.parametrize("check", ["semantic.oracle_max", "semantic.variants"])
async def test_without_an_oracle_the_message_says_how_to_add_one(subject, outcome, check):
    result = await outcome(check, subject(ADDED))
    assert result.status == "skipped"
    assert "add a hook `solve(task)`" in result.reason


@pytest.mark.parametrize(
    ("check", "source", "expected"),
    [
        ("oracle_max", SOLVED, ""),
        ("oracle_max", SOLVED.replace("task.total", "task.nothing"), "is not scored: model failed (hook_raised)"),
        ("oracle_max", SOLVED + CLAIMED.format("maximum=0.5"), "earns 1, the claimed maximum is 0.5"),
        ("variants", SOLVED + CLAIMED.format('variants=[f"{task.total}.0"]'), ""),
        ("variants", SOLVED + CLAIMED.format('variants=["many"]'), "'many', claimed to be right, earns 0"),
        ("reward_range", SOLVED + PAID, "the oracle policy earns 1.5, more than the claimed maximum 1"),
        ("reward_range", SOLVED + CLAIMED.format("chance=2.0"), "chance 2 is above the claimed maximum 1"),
        ("reward_range", SOLVED + UNEQUAL, "components sum to 0.25"),
    ],
)
async def test_rewards_are_compared_with_the_claims(subject, outcome, check, source, expected):
    result = await outcome(f"semantic.{check}", subject(ADDED + source))
    if expected:
        assert expected in result.findings[0].problem
    else:
        assert result.status == "passed"
