"""What an author's hooks may answer; anything else is a failure of its episode that names the hook."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Real
from typing import Any, TypeVar

from gymsdk.errors import Failed, Unscorable
from gymsdk.transcript import Action, Message, ToolCall
from gymsdk.types import State, Step, Verdict

STEPS = "steps"
"""The component of a reward that the steps paid; the host fills it."""

T = TypeVar("T")


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


def step(answer: Any, action: Action) -> Step:
    """Give what `step` answered to *action*; raises `Failed`."""
    taken = expected(answer, Step, "step")
    if not math.isfinite(taken.reward):
        raise Failed(f"hook 'step' paid {taken.reward}, which is no finite reward", kind="bad_answer")
    if taken.output is not None and isinstance(action, Message):
        raise Failed("hook 'step' answered a reply with an output; answer it with messages", kind="bad_answer")
    return taken


def verdict(answer: Any) -> Verdict:
    """Give what `verify` answered; raises `Unscorable` where the reward is not finite, else `Failed`."""
    given = expected(answer, Verdict, "verify")
    if not math.isfinite(given.reward):
        raise Unscorable(f"the verdict's reward is {given.reward}", kind="not_finite")
    if STEPS in given.components:
        raise Failed(f"the component {STEPS!r} is what the steps paid; name the verdict's otherwise", kind="bad_answer")
    total = sum(given.components.values())
    if given.components and not math.isclose(total, given.reward, abs_tol=1e-6):
        message = f"the verdict's components sum to {total:g}, its reward is {given.reward:g}"
        raise Failed(message, kind="bad_answer")
    return given


def solution(answer: Any) -> list[Action] | None:
    """Give the turn `solve` answered, `None` where it does not say; raises `Failed`."""
    if answer is None or isinstance(answer, Message):
        return None if answer is None else [answer]
    if isinstance(answer, ToolCall) or not isinstance(answer, Iterable):
        raise Failed(f"hook 'solve' answered {type(answer).__name__}, not Message or list[ToolCall]", kind="bad_answer")
    return [expected(call, ToolCall, "solve") for call in answer]


def figures(answer: Any) -> dict[str, float]:
    """Give the figures `metrics` answered; raises `Failed`."""
    given = {} if answer is None else expected(answer, dict, "metrics")
    for name, value in given.items():
        if not isinstance(value, Real):
            raise Failed(f"hook 'metrics' answered {value!r} for {name!r}, which is no number", kind="bad_answer")
    return {str(name): float(value) for name, value in given.items()}
