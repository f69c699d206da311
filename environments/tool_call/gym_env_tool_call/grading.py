"""The grading of a request: on what its records and its answer ended as, or on the calls that were made."""

from __future__ import annotations

from collections import Counter

from gymsdk import ToolCall, Transcript, Verdict

from .oracle import planned
from .outputs import outputs, parsed
from .records import Fact, Records, facts
from .rows import Call, Expected, Request
from .values import answered, matched, right

HARM = 0.5
"""What each change that was not asked for costs, and any call where none was needed."""


class Graded(Verdict):
    """The verdict of tool_call: *unasked* counts the changes nobody asked for, or the calls nobody wanted."""

    kind: str
    solved: bool
    calls_needed: int
    calls_made: int
    unasked: int = 0
    given_answer: str | None = None


def by_end(task: Request, expected: Expected, state: Records, transcript: Transcript) -> Graded:
    """Give the verdict on how the records and the answer ended."""
    done, asked, unasked = _compared(facts(task.world.records), facts(state), expected)
    calls = len(transcript.calls())
    unasked += int(expected.without_calls and calls > 0)
    given = answered(transcript.reply)
    components = _components(expected, done=done / asked if asked else 0.0, given=given, unasked=unasked)
    reward = sum(components.values())
    return Graded(
        reward=reward,
        components=components,
        kind=task.kind or "world",
        solved=reward == 1.0,
        calls_needed=len(planned(task).calls),
        calls_made=calls,
        unasked=unasked,
        given_answer=given,
    )


def _components(expected: Expected, *, done: float, given: str | None, unasked: int) -> dict[str, float]:
    """The reward's parts: what was earned, and what was lost of it again."""
    worth = worth_of_changes(expected)
    correct = expected.answer is not None and right(given, expected.answer)
    earned = {"state": worth * done, "answer": (1.0 - worth) * correct}
    return earned | {"harm": 0.0 - min(sum(earned.values()), HARM * unasked)}


def worth_of_changes(expected: Expected) -> float:
    """Give what the changes are worth; the answer is worth the rest."""
    if not (facts(expected.added) or facts(expected.removed)):
        return 0.0
    return 1.0 if expected.answer is None else 0.5


def _compared(before: Counter[Fact], after: Counter[Fact], expected: Expected) -> tuple[int, int, int]:
    added, removed = after - before, before - after
    wanted_new, wanted_gone = facts(expected.added), facts(expected.removed)
    done = (added & wanted_new).total() + (removed & wanted_gone).total()
    asked = wanted_new.total() + wanted_gone.total()
    return done, asked, added.total() + removed.total() - done


def by_calls(task: Request, wanted: list[Call], transcript: Transcript) -> Graded:
    """Give the verdict on the calls made: 1 for exactly those *wanted*; where none is, for a reply without any."""
    calls = transcript.calls()
    found = matched(calls, wanted, ordered=task.ordered)
    exact = found == len(wanted) == len(calls)
    solved = exact and (bool(wanted) or bool(transcript.reply.strip()))
    return _all_or_nothing(task.kind or "ground_truth", len(wanted), calls, solved=solved, unasked=len(calls) - found)


def by_weather(task: Request, transcript: Transcript) -> Graded:
    """Give the verdict on a published weather row: 1 where a call of `get_weather` was answered with the weather."""
    calls, texts = transcript.calls(), outputs(transcript)
    solved = any(call.name == "get_weather" and _is_weather(parsed(texts, call)) for call in calls)
    return _all_or_nothing(task.kind or "get_weather", 1, calls, solved=solved)


def _all_or_nothing(kind: str, needed: int, calls: list[ToolCall], *, solved: bool, unasked: int = 0) -> Graded:
    return Graded(
        reward=float(solved),
        components={"calls": float(solved)},
        kind=kind,
        solved=solved,
        calls_needed=needed,
        calls_made=len(calls),
        unasked=unasked,
    )


def _is_weather(answer: object) -> bool:
    return isinstance(answer, dict) and "weather_description" in answer
