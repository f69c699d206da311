"""The row: a request to an assistant, with one of three ways to grade it, and a plan that solves it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Self, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from gymsdk import Task

from .world import Records, World, count_facts

Answer: TypeAlias = str | int | float
"""The answer to a request: a number, compared by value, or text."""


def drop_nulls(value: Any) -> Any:
    """Return the JSON *value* without keys that have a null. Tabular formats pad nested objects with such keys."""
    if isinstance(value, list):
        return [drop_nulls(each) if isinstance(each, (dict, list)) else each for each in value]
    if isinstance(value, dict):
        return {
            key: drop_nulls(each) if isinstance(each, (dict, list)) else each
            for key, each in value.items()
            if each is not None
        }
    return value


def _parse_object(given: Any) -> Any:
    return json.loads(given) if isinstance(given, str) else given


class Call(BaseModel):
    """A tool call of a row. The arguments are an object, or an object as JSON text."""

    model_config = ConfigDict(frozen=True)

    name: str
    arguments: Annotated[dict[str, Any], BeforeValidator(_parse_object)] = {}


class Plan(BaseModel):
    """A solution of a row: *calls* in order, then *answer*.

    Text in *calls* and *answer* may refer to the output of an earlier call: `{0.contacts.1.phone}` is the phone
    number of the second contact in the output of the first call.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    calls: list[Call] = []
    answer: Answer | None = None


class Expected(BaseModel):
    """The expected end of an episode.

    Attributes:
        added: The records that the assistant must add.
        removed: The records that the assistant must remove.
        answer: The answer that the assistant must give.
        without_calls: Whether the request needs no tool call. Any call then lowers the reward.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    added: Records = Field(default_factory=Records)
    removed: Records = Field(default_factory=Records)
    answer: Answer | None = None
    without_calls: bool = False

    @model_validator(mode="after")
    def _check_not_empty(self) -> Self:
        if self.answer is None and not count_facts(self.added) and not count_facts(self.removed):
            raise ValueError("`expected` asks for nothing; give it an `answer`, something `added` or `removed`")
        return self


class Request(Task):
    """A row of tool_call.

    There are three sorts of rows: with *expected*, with *ground_truth*, and weather rows with neither.

    Attributes:
        kind: The kind of request, for the metrics.
        world: The world of the episode.
        expected: The expected end of the episode. The environment grades the final records and the answer.
        plan: A solution. Without it, the oracle makes the expected changes directly.
        offered: The names of the tools that the policy may call. `None`: all tools.
        ground_truth: The expected calls. The environment grades the calls of the policy.
        ordered: Whether the calls must have the order of *ground_truth*.
    """

    kind: str | None = None
    world: World = Field(default_factory=World)
    expected: Expected | None = None
    plan: Plan | None = None
    offered: list[str] | None = None
    ground_truth: list[Call] | None = None
    ordered: bool = False

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, row: Any) -> Any:
        if not isinstance(row, dict):
            return row
        own = cls.model_fields.keys() - Task.model_fields.keys()
        return {key: drop_nulls(row[key]) if key in own else row[key] for key in row if _is_kept(row, key, own)}

    @model_validator(mode="after")
    def _check_gradable(self) -> Self:
        if self.expected is not None and self.ground_truth is not None:
            raise ValueError("the row has both `expected` and `ground_truth`; keep the one to grade by")
        if self.expected is None and self.ground_truth is None and "get_weather" not in (self.tools or ["get_weather"]):
            raise ValueError("the row has no `ground_truth` and no `expected`; add the one to grade by")
        removed = count_facts(self.expected.removed) if self.expected is not None else None
        if removed and removed - count_facts(self.world.records):
            raise ValueError("`expected.removed` has a record that `world.records` does not have; add it there too")
        return self

    @property
    def tools(self) -> list[str]:
        """The names of the tools that the row defines."""
        return [str(tool.get("name", "")) for tool in self.responses_create_params.get("tools") or []]

    @property
    def one_at_a_time(self) -> bool:
        """Whether a turn may contain at most one call."""
        return self.responses_create_params.get("parallel_tool_calls") is False


def _is_kept(row: dict[str, Any], key: str, own: set[str]) -> bool:
    return key not in own or row[key] is not None


REFERENCE = re.compile(r"\{(\d+)\.([\w.]+)\}")


def fill_references(template: Any, outputs: Mapping[int, Any]) -> Any:
    """Replace each reference in *template* by its value in *outputs*.

    A string that consists of a single reference becomes the value itself. A reference without a value stays
    unchanged.
    """
    if isinstance(template, dict):
        return {key: fill_references(each, outputs) for key, each in template.items()}
    if isinstance(template, list):
        return [fill_references(each, outputs) for each in template]
    if not isinstance(template, str):
        return template
    whole = REFERENCE.fullmatch(template)
    return _look_up(whole, outputs) if whole else REFERENCE.sub(lambda found: str(_look_up(found, outputs)), template)


def _look_up(reference: re.Match[str], outputs: Mapping[int, Any]) -> Any:
    value = outputs.get(int(reference[1]))
    for key in reference[2].split("."):
        if isinstance(value, dict) and key in value:
            value = value[key]
        elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            return reference[0]
    return value


def referenced_calls(template: Any) -> set[int]:
    """Return the numbers of the calls that *template* refers to."""
    if isinstance(template, dict):
        return referenced_calls(list(template.values()))
    if isinstance(template, list):
        return {number for each in template for number in referenced_calls(each)}
    return {int(number) for number, _ in REFERENCE.findall(template)} if isinstance(template, str) else set()


def group_turns(plan: Plan) -> list[list[int]]:
    """Group the numbers of the plan's calls by turn. A call is in the first turn in which its references are known."""
    found: list[list[int]] = []
    turn_of: dict[int, int] = {}
    for number, call in enumerate(plan.calls):
        turn = max(
            (turn_of[earlier] + 1 for earlier in referenced_calls(call.arguments) if earlier in turn_of), default=0
        )
        turn_of[number] = turn
        found += [[] for _ in range(turn + 1 - len(found))]
        found[turn].append(number)
    return found
