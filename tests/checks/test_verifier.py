"""Repeated verdicts on one transcript."""

from __future__ import annotations

import pytest

SOURCE = """
COUNT = {"asked": 0}

class Memory(State):
    seen: list[str] = []

@hookimpl
def reset():
    return Reset(state=Memory(seen=["b", "a"]))

@hookimpl
def tasks(split: Literal["train"], seed: int):
    for number in range(9):
        yield Task.ask(f"{number}?", total=str(number), parts=["y", "x"])

@hookimpl
def solve(task):
    return Message(content=task.total)

@hookimpl
def verify(task, transcript, state: Memory):
    BODY
    return Verdict(reward=float(transcript.reply == task.total))
"""
CHECK = "semantic.verifier_determinism"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("state.seen.sort()", "changes its arguments: state.seen"),
        ("task.parts.sort()", "changes its arguments: task.parts"),
        ("task.responses_create_params.clear()", "changes its arguments: task"),
        ("transcript.items.append({})", "changes its arguments: transcript"),
        ("transcript.ended = None", "changes its arguments: transcript"),
        (
            "COUNT['asked'] += 1; return Verdict(reward=COUNT['asked'] % 2)",
            "the verdict changes when one transcript is judged again",
        ),
        ("COUNT['asked'] += 1; 1 / (COUNT['asked'] % 3)", "the verdict changes"),
    ],
)
async def test_changes_by_the_verifier_are_found(subject, outcome, body, expected):
    [first, *_] = (await outcome(CHECK, subject(SOURCE.replace("BODY", body)))).findings
    assert expected in first.problem


async def test_a_verifier_that_only_reads_passes(subject, outcome):
    assert (await outcome(CHECK, subject(SOURCE.replace("BODY", "sorted(state.seen)")))).status == "passed"


async def test_a_verifier_that_always_fails_is_not_compared(subject, outcome):
    result = await outcome(CHECK, subject(SOURCE.replace("BODY", "raise ValueError")))
    assert (result.status, result.reason.startswith("no play of a task was scored")) == ("skipped", True)
