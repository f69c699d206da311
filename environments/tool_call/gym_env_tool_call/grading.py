"""Grade a request on the final records and the answer, or on the calls; the metrics, and the reward of a guess."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from gymsdk import Rollout, ToolCall, Transcript, Verdict

from .oracle import get_plan, parse_output
from .rows import Answer, Call, Expected, Request
from .world import Fact, Records, count_facts, normalize_text

ANSWER = re.compile(r"[\s>*_#`-]*answer[*_`]*\s*:", re.IGNORECASE)
MARKS = " \t*_`"
NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")
MINUSES = str.maketrans("−–", "--")  # noqa: RUF001  # models write different minus characters
HALF_A_HUNDREDTH = 0.005 + 1e-9


def json_equal(left: Any, right: Any) -> bool:
    """Return whether two JSON values are equal.

    1 equals 1.0, true does not equal 1, and "a" does not equal "A". A key with the value null counts as absent.
    """
    if isinstance(left, dict) and isinstance(right, dict):
        keys = _list_present_keys(left)
        return keys == _list_present_keys(right) and all(json_equal(left[key], right[key]) for key in keys)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(json_equal, left, right))
    if _is_number(left) and _is_number(right):
        return _numbers_equal(left, right)
    return type(left) is type(right) and bool(left == right)


def _list_present_keys(value: dict[str, Any]) -> set[str]:
    return {key for key, each in value.items() if each is not None}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _numbers_equal(left: float, right: float) -> bool:
    if left == right:
        return True
    if isinstance(left, int) and isinstance(right, int):
        return False
    try:
        return math.isclose(left, right, rel_tol=1e-9)
    except OverflowError:  # an integer beyond the range of floats is not close to any float
        return False


def count_matching_calls(calls: Sequence[ToolCall], wanted: Sequence[Call], *, ordered: bool) -> int:
    """Count the wanted calls among *calls*.

    Args:
        calls: The calls of the policy.
        wanted: The wanted calls.
        ordered: Whether to compare position by position and stop at the first difference.

    Returns:
        The number of wanted calls that the policy made. Each call matches at most one wanted call.
    """
    if ordered:
        pairs = zip(calls, wanted, strict=False)
        return next(
            (index for index, pair in enumerate(pairs) if not _is_wanted_call(*pair)), min(len(calls), len(wanted))
        )
    left = list(calls)
    found = 0
    for want in wanted:
        fit = next((index for index, call in enumerate(left) if _is_wanted_call(call, want)), None)
        if fit is not None:
            del left[fit]
            found += 1
    return found


def _is_wanted_call(call: ToolCall, want: Call) -> bool:
    return call.name == want.name and json_equal(call.parsed(), want.arguments)


def extract_answer(reply: str) -> str | None:
    """Return the text of the last `Answer:` line in *reply*, or `None` if there is no such line."""
    lines = reply.splitlines()
    found = [line[match.end() :].strip(MARKS) for line in lines if (match := ANSWER.match(line))]
    return found[-1] or None if found else None


def is_correct(given: str | None, answer: Answer) -> bool:
    """Return whether *given* equals *answer*.

    A number must be the only number in *given* and match to two decimals. Text must be equal after normalization.
    """
    if given is None:
        return False
    if isinstance(answer, str):
        return normalize_text(given) == normalize_text(answer)
    numbers: list[str] = NUMBER.findall(given.translate(MINUSES))
    return len(numbers) == 1 and abs(float(numbers[0].replace(",", "")) - answer) <= HALF_A_HUNDREDTH


PENALTY = 0.5
"""The penalty for each unrequested change, and for making calls if the request needs no call."""


class RequestVerdict(Verdict):
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


def grade_end(task: Request, expected: Expected, state: Records, transcript: Transcript) -> RequestVerdict:
    """Grade the final records and the answer."""
    done, asked, unasked = _compare_records(count_facts(task.world.records), count_facts(state), expected)
    calls = len(transcript.calls())
    unasked += int(expected.without_calls and calls > 0)
    given = extract_answer(transcript.reply)
    components = _compute_components(expected, done=done / asked if asked else 0.0, given=given, unasked=unasked)
    reward = sum(components.values())
    return RequestVerdict(
        reward=reward,
        components=components,
        kind=task.kind or "world",
        solved=reward == 1.0,
        calls_needed=len(get_plan(task).calls),
        calls_made=calls,
        unasked=unasked,
        given_answer=given,
    )


def _compute_components(expected: Expected, *, done: float, given: str | None, unasked: int) -> dict[str, float]:
    """Return the components of the reward: the earned parts, and the penalty as a negative number."""
    worth = compute_change_share(expected)
    correct = expected.answer is not None and is_correct(given, expected.answer)
    earned = {"state": worth * done, "answer": (1.0 - worth) * correct}
    return earned | {"harm": 0.0 - min(sum(earned.values()), PENALTY * unasked)}


def compute_change_share(expected: Expected) -> float:
    """Return the share of the reward for the changes. The answer has the remaining share."""
    if not (count_facts(expected.added) or count_facts(expected.removed)):
        return 0.0
    return 1.0 if expected.answer is None else 0.5


def _compare_records(before: Counter[Fact], after: Counter[Fact], expected: Expected) -> tuple[int, int, int]:
    added, removed = after - before, before - after
    wanted_new, wanted_gone = count_facts(expected.added), count_facts(expected.removed)
    done = (added & wanted_new).total() + (removed & wanted_gone).total()
    asked = wanted_new.total() + wanted_gone.total()
    return done, asked, added.total() + removed.total() - done


def grade_calls(task: Request, wanted: list[Call], transcript: Transcript) -> RequestVerdict:
    """Grade the calls: the reward is 1.0 for exactly the *wanted* calls.

    If *wanted* is empty, the reward is 1.0 for a non-empty reply without calls.
    """
    calls = transcript.calls()
    found = count_matching_calls(calls, wanted, ordered=task.ordered)
    exact = found == len(wanted) == len(calls)
    solved = exact and (bool(wanted) or bool(transcript.reply.strip()))
    return _build_verdict(task.kind or "ground_truth", len(wanted), calls, solved=solved, unasked=len(calls) - found)


def grade_weather(task: Request, transcript: Transcript) -> RequestVerdict:
    """Grade a weather row: the reward is 1.0 if a call of `get_weather` returned the weather."""
    calls, texts = transcript.calls(), transcript.outputs()
    solved = any(call.name == "get_weather" and _is_weather(parse_output(texts, call)) for call in calls)
    return _build_verdict(task.kind or "get_weather", 1, calls, solved=solved)


def _build_verdict(kind: str, needed: int, calls: list[ToolCall], *, solved: bool, unasked: int = 0) -> RequestVerdict:
    return RequestVerdict(
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


def compute_metrics(rollouts: Iterable[Rollout]) -> dict[str, float]:
    """Compute the metrics of *rollouts*.

    Returns:
        `<subset>/mean/reward` by kind and by needed calls, and `overstepped`, the share of rollouts with
        unrequested actions.
    """
    found: defaultdict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        # A verdict from a file is a plain `Verdict` with extra fields. A verdict from the host has only a reward.
        fields = rollout.verdict.model_dump() if rollout.verdict else {}
        for subset in _list_subsets(rollout.row, fields):
            found[f"{subset}/mean/reward"].append(rollout.reward or 0.0)
        if "unasked" in fields:
            found["overstepped"].append(float(fields["unasked"] > 0))
    return {name: fmean(values) for name, values in sorted(found.items())}


def _list_subsets(row: Mapping[str, object], fields: Mapping[str, object]) -> list[str]:
    by = {"kind": fields.get("kind") or row.get("kind"), "calls": fields.get("calls_needed")}
    return [f"{name}={value}" for name, value in by.items() if value is not None]


GUESSED_ANSWER = 0.05
"""An upper bound on how often the most frequent answer occurs in generated requests."""

GUESSED_ARGUMENT = 0.1
"""The chance of guessing a number in a ground truth, which is usually small."""


def compute_guess_reward(task: Request) -> float:
    """Return the highest expected reward of guessing at *task*.

    Any call of the only tool solves a weather row. Any reply solves a row with an empty ground truth.
    """
    if task.ground_truth is not None:
        return math.prod(_compute_call_chance(call, task) for call in task.ground_truth)
    if task.expected is None:
        return 1.0
    return (1.0 - compute_change_share(task.expected)) * GUESSED_ANSWER


def _compute_call_chance(call: Call, task: Request) -> float:
    schema = _get_schema(call.name, task)
    guesses = [_compute_guess_chance(value, schema.get(name)) for name, value in call.arguments.items()]
    return math.prod(guesses) / max(1, len(task.tools))


def _get_schema(name: str, task: Request) -> dict[str, Any]:
    offered = task.responses_create_params.get("tools") or []
    parameters = next((tool.get("parameters") for tool in offered if tool.get("name") == name), None) or {}
    return parameters.get("properties") or {}


def _compute_guess_chance(value: Any, schema: Any) -> float:
    choices = schema.get("enum") if isinstance(schema, dict) else None
    if choices:
        return 1.0 / len(choices)
    if isinstance(value, bool):
        return 0.5
    return GUESSED_ARGUMENT if isinstance(value, (int, float)) else 0.0
