"""Grade a request: on the final records and the answer, or on the calls."""

from __future__ import annotations

from collections import Counter

from gymsdk import ToolCall, Transcript, Verdict

from .oracle import plan_for
from .outputs import outputs, parsed
from .records import Fact, Records, facts
from .rows import Call, Expected, Request
from .values import count_matching_calls, extract_answer, is_correct

HARM = 0.5
"""The penalty for each unrequested change, and for making calls if the request needs no call."""


class Graded(Verdict):
    """The verdict of tool_call.

    Attributes:
        kind: The kind of request.
        solved: Whether the reward is 1.0.
        calls_needed: The number of calls in the solution.
        calls_made: The number of calls of the policy.
        unasked: The number of unrequested changes, or of unexpected calls in a row with a ground truth.
        given_answer: The answer of the policy, or `None`.
    """

    kind: str
    solved: bool
    calls_needed: int
    calls_made: int
    unasked: int = 0
    given_answer: str | None = None


def by_end(task: Request, expected: Expected, state: Records, transcript: Transcript) -> Graded:
    """Grade the final records and the answer."""
    done, asked, unasked = _compared(facts(task.world.records), facts(state), expected)
    calls = len(transcript.calls())
    unasked += int(expected.without_calls and calls > 0)
    given = extract_answer(transcript.reply)
    components = _components(expected, done=done / asked if asked else 0.0, given=given, unasked=unasked)
    reward = sum(components.values())
    return Graded(
        reward=reward,
        components=components,
        kind=task.kind or "world",
        solved=reward == 1.0,
        calls_needed=len(plan_for(task).calls),
        calls_made=calls,
        unasked=unasked,
        given_answer=given,
    )


def _components(expected: Expected, *, done: float, given: str | None, unasked: int) -> dict[str, float]:
    """Return the components of the reward: the earned parts, and the penalty as a negative number."""
    worth = worth_of_changes(expected)
    correct = expected.answer is not None and is_correct(given, expected.answer)
    earned = {"state": worth * done, "answer": (1.0 - worth) * correct}
    return earned | {"harm": 0.0 - min(sum(earned.values()), HARM * unasked)}


def worth_of_changes(expected: Expected) -> float:
    """Return the share of the reward for the changes. The answer has the remaining share."""
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
    """Grade the calls: the reward is 1.0 for exactly the *wanted* calls.

    If *wanted* is empty, the reward is 1.0 for a non-empty reply without calls.
    """
    calls = transcript.calls()
    found = count_matching_calls(calls, wanted, ordered=task.ordered)
    exact = found == len(wanted) == len(calls)
    solved = exact and (bool(wanted) or bool(transcript.reply.strip()))
    return _all_or_nothing(task.kind or "ground_truth", len(wanted), calls, solved=solved, unasked=len(calls) - found)


def by_weather(task: Request, transcript: Transcript) -> Graded:
    """Grade a weather row: the reward is 1.0 if a call of `get_weather` returned the weather."""
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
