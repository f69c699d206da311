"""Results of hooks: those that the host supplies for hooks that an author leaves out, and checks of all of them."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from itertools import chain
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from gymsdk import tools
from gymsdk.concurrency import INTERRUPTS
from gymsdk.errors import Failed, Unscorable, describe_exception, format_validation_error
from gymsdk.jsonl import dump_portable_json, read_rows
from gymsdk.plugins.hooks import hookimpl
from gymsdk.types import (
    ROLLOUT_FIELDS,
    STEPS_COMPONENT,
    Action,
    Claims,
    Config,
    Message,
    Reset,
    Row,
    State,
    Step,
    Task,
    ToolCall,
    Verdict,
)

IMMUTABLE_TYPES = frozenset({bool, bytes, float, int, str, type(None)})
"""The types of fields that a copy of a state may share with the state."""

FLAT_CONTAINER_TYPES = frozenset({dict, list, set})
"""The types of fields that a shallow copy separates if their members are immutable."""

VERDICT_FIELDS = tuple(Verdict.model_fields)

RunFunction = Callable[[str, Callable[..., Any], dict[str, Any]], Awaitable[Any]]
"""Runs an author's function by its deadline; takes its name for messages, the function and the arguments."""

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)


# The default plugin


class DefaultPlugin:
    """The implementations of hooks that an author leaves to the host.

    Args:
        run: Runs the functions of tools.
        data: The package's folder of task files, if there is one.

    Attributes:
        toolbox: The tools by name; set after the author's `tools` hook was called.
    """

    def __init__(self, run: RunFunction, data: Path | None) -> None:
        self.toolbox: Mapping[str, tools.Tool] = {}
        self._run = run
        self._data = data

    @hookimpl
    def reset(self) -> Reset:
        """Open with the row's prompt and offer every tool."""
        return Reset()

    @hookimpl
    async def step(self, task: Task, state: State, action: Action, config: Config, shared: Any) -> Step:
        """Run the called tool; end the episode on a reply."""
        if isinstance(action, Message):
            return Step(done=True)
        tool = self.toolbox.get(action.name)
        if tool is None:
            # The row may list further tools. `Environment.step` has checked that this tool is offered.
            message = f"The tool {action.name!r} cannot be run here; continue without it."
            return Step(output=tools.format_error_output(message))
        try:
            arguments = tool.parse_arguments(action.arguments)
        except tools.InvalidArguments as error:
            return Step(output=tools.format_error_output(str(error)))
        except INTERRUPTS:
            raise
        except BaseException as error:
            reason = describe_exception(error, tool.function)
            message = f"tool {action.name!r}: a validator of its arguments raised {reason}"
            raise Failed(message, kind="tool_raised") from error
        available = {"task": task, "state": state, "config": config, "shared": shared}
        host_arguments = {name: available[name] for name in tool.host_parameters}
        value = await self._run(f"tool {action.name!r}", tool.function, {**arguments, **host_arguments})
        try:
            return Step(output=tools.serialize_output(value))
        except TypeError as error:
            raise Failed(f"tool {action.name!r} {error}", kind="tool_bad_answer") from error

    @hookimpl
    def verify(self) -> Verdict:
        """Return a reward of 0 for an environment whose steps return the rewards."""
        return Verdict(reward=0.0)

    @hookimpl
    def claims(self) -> Claims:
        """Claim a maximum of 1 and a chance level of 0."""
        return Claims()

    @hookimpl
    def tasks(self, split: str) -> Iterator[Row]:
        """Read the package's `data/<split>.jsonl`."""
        return (row for _, row in read_rows(self.get_task_file(split)))

    def get_task_file(self, split: str) -> Path:
        """Return the path of the package's file for *split*."""
        return (self._data or Path("data")) / f"{split}.jsonl"

    def list_splits(self) -> tuple[str, ...]:
        """Return the splits for which the package has files."""
        return tuple(sorted(path.stem for path in self._data.glob("*.jsonl"))) if self._data else ()


# Checks of results


def check_type(result: Any, kind: type[T], hook: str) -> T:
    """Return the *result* of *hook*; raises `Failed` if it is not of this *kind*."""
    if isinstance(result, kind):
        return result
    raise Failed(f"hook {hook!r} returned {type(result).__name__}, expected {kind.__name__}", kind="bad_answer")


def copy_state(state: State) -> State:
    """Return a deep copy of *state* for one episode; raises `Failed` if it cannot be copied."""
    try:
        containers = _list_flat_containers(state)
        copied = state.model_copy(deep=containers is None)
    except Exception as error:
        message = (
            f"the state that `reset` returned cannot be copied ({error}); keep handles in `shared`, not in the state"
        )
        raise Failed(message, kind="bad_answer") from error
    vars(copied).update({name: value.copy() for name, value in (containers or {}).items()})
    return copied


def _list_flat_containers(state: State) -> dict[str, Any] | None:
    """Return the values of *state* that are lists, sets and dictionaries of immutable values.

    `None` if a value is neither immutable nor such a container, or if two names share one: then only a deep copy is
    right, which takes ten times as long.
    """
    if state.__pydantic_private__ or state.__pydantic_extra__:
        return None
    containers = {name: value for name, value in vars(state).items() if type(value) not in IMMUTABLE_TYPES}
    for value in containers.values():
        if type(value) not in FLAT_CONTAINER_TYPES:
            return None
        members = chain(value, value.values()) if isinstance(value, dict) else value
        if not IMMUTABLE_TYPES.issuperset(map(type, members)):
            return None
    return containers if len({*map(id, containers.values())}) == len(containers) else None


def check_reset(result: Any) -> Reset:
    """Return the result of `reset`; raises `Failed` if it is invalid."""
    return _revalidate(check_type(result, Reset, "reset"), "reset")


def check_step(result: Any, action: Action) -> Step:
    """Return the result of `step` for *action*; raises `Failed` if it is invalid."""
    step = _revalidate(check_type(result, Step, "step"), "step")
    if not math.isfinite(step.reward):
        raise Failed(f"hook 'step' returned the reward {step.reward}; a reward must be finite", kind="bad_answer")
    if step.output is not None and isinstance(action, Message):
        raise Failed("hook 'step' returned an output for a reply; return messages", kind="bad_answer")
    return step


def check_verdict(result: Any) -> Verdict:
    """Return the result of `verify`: complete, with a finite reward and fields that JSON supports.

    Raises:
        Unscorable: The reward is not finite.
        Failed: The verdict is invalid in another way.
    """
    verdict = check_type(result, Verdict, "verify")
    _check_verdict_base(verdict)
    if not math.isfinite(verdict.reward):
        raise Unscorable(f"the verdict's reward is {verdict.reward}", kind="not_finite")
    if STEPS_COMPONENT in verdict.components:
        message = f"the component {STEPS_COMPONENT!r} is reserved for the rewards of the steps; rename the verdict's"
        raise Failed(message, kind="bad_answer")
    total = sum(verdict.components.values())
    if verdict.components and not math.isclose(total, verdict.reward, abs_tol=1e-6):
        message = f"the verdict's components sum to {total:g}, its reward is {verdict.reward:g}"
        raise Failed(message, kind="bad_answer")
    _check_verdict_fields(verdict)
    return verdict


def add_rewards(paid: float, reward: float, stage: str) -> float:
    """Return the sum of two finite rewards; raises `Failed` at *stage* if the sum is not finite."""
    if math.isfinite(total := paid + reward):
        return total
    message = f"the episode's rewards sum to {total}: {reward:g} after {paid:g}; return rewards whose sum is finite"
    raise Failed(message, kind="not_finite", stage=stage)


def check_solution(result: Any) -> list[Action] | None:
    """Return the turn that `solve` returned, `None` if it has no solution; raises `Failed` if it is invalid."""
    if result is None or isinstance(result, Message):
        return None if result is None else [result]
    if isinstance(result, ToolCall) or not isinstance(result, Iterable):
        message = f"hook 'solve' returned {type(result).__name__}, expected Message or list[ToolCall]"
        raise Failed(message, kind="bad_answer")
    return [check_type(call, ToolCall, "solve") for call in result]


def check_metrics(result: Any) -> dict[str, float]:
    """Return the metrics that `metrics` returned; raises `Failed` if they are invalid."""
    metrics = {} if result is None else check_type(result, dict, "metrics")
    return {str(name): _check_metric(name, value) for name, value in metrics.items()}


def _revalidate(result: M, hook: str) -> M:
    """Validate a model again: `model_construct` and `model_copy` create models without validation."""
    kind = type(result)
    try:
        return kind.model_validate(vars(result))
    except ValidationError as error:
        message = f"hook {hook!r} returned an invalid {kind.__name__}: {format_validation_error(error)}"
        raise Failed(message, kind="bad_answer") from error


def _check_verdict_base(verdict: Verdict) -> None:
    """Check the fields that every verdict has.

    The author's fields are not validated again, because an author's validator need not accept its own result.
    """
    base = {name: getattr(verdict, name) for name in VERDICT_FIELDS if hasattr(verdict, name)}
    try:
        Verdict.model_validate(base, strict=True)
    except ValidationError as error:
        message = f"hook 'verify' returned an invalid verdict: {format_validation_error(error)}"
        raise Failed(message, kind="bad_answer") from error


def _check_verdict_fields(verdict: Verdict) -> None:
    """Check that a rollout's line can hold the verdict's fields."""
    name = type(verdict).__name__
    try:
        fields = verdict.model_dump(mode="json", exclude={"reward", "components"}, warnings=False)
        dump_portable_json(fields)
    except Exception as error:  # an author's serializer may raise any exception
        message = f"the verdict ({name}) cannot be written as JSON: {error}; give its fields values that JSON supports"
        raise Failed(message, kind="bad_answer") from error
    if reserved := sorted(fields.keys() & ROLLOUT_FIELDS):
        message = f"the verdict ({name}) has a field {reserved[0]!r}, which every rollout's line has; rename the field"
        raise Failed(message, kind="bad_answer")


def _check_metric(name: object, value: object) -> float:
    if not isinstance(value, Real):
        raise Failed(f"hook 'metrics' returned {value!r} for {name!r}, expected a number", kind="bad_answer")
    try:
        return float(value)
    except OverflowError:
        message = f"hook 'metrics' returned a number for {name!r} that is too large for a float"
        raise Failed(message, kind="bad_answer") from None
