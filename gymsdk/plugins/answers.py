"""What an author's hooks may answer; anything else is a failure of its episode that names the hook."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Real
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from gymsdk import complaints, rows
from gymsdk.errors import Failed, Unscorable
from gymsdk.transcript import Action, Message, ToolCall
from gymsdk.types import LINE, Reset, State, Step, Verdict

STEPS = "steps"
"""The component of a reward that the steps paid; the host fills it."""

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)


def expected(answer: Any, kind: type[T], hook: str) -> T:
    """Give *answer* where it is of its *kind*; raises `Failed`."""
    if isinstance(answer, kind):
        return answer
    raise Failed(f"hook {hook!r} answered {type(answer).__name__}, not {kind.__name__}", kind="bad_answer")


def copied(state: State) -> State:
    """Give a copy of *state* that is the episode's own; raises `Failed` where it holds what cannot be copied."""
    try:
        return state.model_copy(deep=True)
    except Exception as error:
        message = f"the state `reset` gave cannot be copied ({error}); keep handles in `shared`, not in the state"
        raise Failed(message, kind="bad_answer") from error


def _validated(answer: M, hook: str) -> M:
    """Return *answer* validated once more: `model_construct` and `model_copy` make models that nothing has checked."""
    kind = type(answer)
    try:
        return kind.model_validate(vars(answer))
    except ValidationError as error:
        message = f"hook {hook!r} answered a {kind.__name__} that is not valid: {complaints.sentence(error)}"
        raise Failed(message, kind="bad_answer") from error


def reset(answer: Any) -> Reset:
    """Return what `reset` answered; raises `Failed`."""
    return _validated(expected(answer, Reset, "reset"), "reset")


def step(answer: Any, action: Action) -> Step:
    """Return what `step` answered to *action*; raises `Failed`."""
    taken = _validated(expected(answer, Step, "step"), "step")
    if not math.isfinite(taken.reward):
        raise Failed(f"hook 'step' paid {taken.reward}, which is no finite reward", kind="bad_answer")
    if taken.output is not None and isinstance(action, Message):
        raise Failed("hook 'step' answered a reply with an output; answer it with messages", kind="bad_answer")
    return taken


def verdict(answer: Any) -> Verdict:
    """Return what `verify` answered.

    The verdict is complete, its reward is finite, and JSON can hold its fields, so that every face can report it.

    Raises:
        Unscorable: The reward is not finite.
        Failed: The answer is wrong in any other way.
    """
    given = expected(answer, Verdict, "verify")
    _check_base(given)
    if not math.isfinite(given.reward):
        raise Unscorable(f"the verdict's reward is {given.reward}", kind="not_finite")
    if STEPS in given.components:
        raise Failed(f"the component {STEPS!r} is what the steps paid; name the verdict's otherwise", kind="bad_answer")
    total = sum(given.components.values())
    if given.components and not math.isclose(total, given.reward, abs_tol=1e-6):
        message = f"the verdict's components sum to {total:g}, its reward is {given.reward:g}"
        raise Failed(message, kind="bad_answer")
    _check_fields(given)
    return given


def _check_base(given: Verdict) -> None:
    """Check the fields that every verdict has.

    The author's own fields are not validated again: a validator of the author's need not accept its own result.
    """
    base = {name: getattr(given, name) for name in Verdict.model_fields if hasattr(given, name)}
    try:
        Verdict.model_validate(base, strict=True)
    except ValidationError as error:
        message = f"hook 'verify' answered a verdict that is not valid: {complaints.sentence(error)}"
        raise Failed(message, kind="bad_answer") from error


def _check_fields(given: Verdict) -> None:
    """Check that the verdict's fields can stand on a rollout's line."""
    name = type(given).__name__
    try:
        fields = given.model_dump(mode="json", exclude={"reward", "components"}, warnings=False)
        rows.written(fields)
    except Exception as error:  # a serialiser of the author's may raise anything
        message = f"the verdict ({name}) cannot be written as JSON: {error}; give its fields values that JSON can hold"
        raise Failed(message, kind="bad_answer") from error
    if taken := sorted(fields.keys() & LINE):
        message = f"the verdict ({name}) has a field {taken[0]!r}, which a rollout's line has already; rename the field"
        raise Failed(message, kind="bad_answer")


def total(paid: float, reward: float, stage: str) -> float:
    """Return the sum of two finite rewards; raises `Failed` at *stage* if the sum is not finite."""
    if math.isfinite(added := paid + reward):
        return added
    message = f"the episode's rewards add up to {added}: {reward:g} after {paid:g}; pay rewards whose sum is finite"
    raise Failed(message, kind="not_finite", stage=stage)


def solution(answer: Any) -> list[Action] | None:
    """Give the turn `solve` answered, `None` where it does not say; raises `Failed`."""
    if answer is None or isinstance(answer, Message):
        return None if answer is None else [answer]
    if isinstance(answer, ToolCall) or not isinstance(answer, Iterable):
        raise Failed(f"hook 'solve' answered {type(answer).__name__}, not Message or list[ToolCall]", kind="bad_answer")
    return [expected(call, ToolCall, "solve") for call in answer]


def figures(answer: Any) -> dict[str, float]:
    """Return the figures `metrics` answered; raises `Failed`."""
    given = {} if answer is None else expected(answer, dict, "metrics")
    return {str(name): _figure(name, value) for name, value in given.items()}


def _figure(name: object, value: object) -> float:
    if not isinstance(value, Real):
        raise Failed(f"hook 'metrics' answered {value!r} for {name!r}, which is no number", kind="bad_answer")
    try:
        return float(value)
    except OverflowError:
        message = f"hook 'metrics' answered a number for {name!r} that is too large for a figure"
        raise Failed(message, kind="bad_answer") from None
