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
PAID = """
@hookimpl
def step(action):
    return Step(reward=0.5, done=True)
"""


async def test_a_correct_oracle_passes(subject, outcome):
    assert (await outcome("semantic.oracle_max", subject(ADDED + SOLVED))).status == "passed"


@pytest.mark.parametrize("check", ["semantic.oracle_max", "semantic.variants"])
async def test_without_an_oracle_the_message_says_how_to_add_one(subject, outcome, check):
    result = await outcome(check, subject(ADDED))
    assert result.status == "skipped"
    assert "add a hook `solve(task)`" in result.reason


async def test_a_failing_oracle_is_found(subject, outcome):
    added = subject(ADDED + SOLVED.replace("task.total", "task.nothing"))
    [first, *_] = (await outcome("semantic.oracle_max", added)).findings
    assert "is not scored: model failed (hook_raised)" in first.problem


async def test_an_oracle_above_the_claimed_maximum_is_found(subject, outcome):
    added = subject(ADDED + SOLVED + CLAIMED.format("maximum=0.5"))
    [first, *_] = (await outcome("semantic.oracle_max", added)).findings
    assert "earns 1, the claimed maximum is 0.5" in first.problem


async def test_a_variant_replaces_the_last_reply(subject, outcome):
    added = subject(ADDED + SOLVED + CLAIMED.format('variants=[f"{task.total}.0"]'))
    assert (await outcome("semantic.variants", added)).status == "passed"


async def test_a_rejected_variant_is_found(subject, outcome):
    added = subject(ADDED + SOLVED + CLAIMED.format('variants=["many"]'))
    assert "'many', claimed to be right, earns 0" in (await outcome("semantic.variants", added)).findings[0].problem


async def test_step_rewards_count(subject, outcome):
    [first, *_] = (await outcome("semantic.reward_range", subject(ADDED + SOLVED + PAID))).findings
    assert "the oracle policy earns 1.5, more than the claimed maximum 1" in first.problem


async def test_a_chance_above_the_maximum_is_found(subject, outcome):
    added = subject(ADDED + SOLVED + CLAIMED.format("chance=2.0"))
    assert (
        "chance 2 is above the claimed maximum 1" in (await outcome("semantic.reward_range", added)).findings[0].problem
    )


async def test_components_that_do_not_add_up_are_found(subject, outcome):
    source = ADDED.replace("reward=float(right)", 'reward=float(right), components={"a": 0.25}')
    [first, *_] = (await outcome("semantic.reward_range", subject(source + SOLVED))).findings
    assert "components sum to 0.25" in first.problem
