"""The row: a request to an assistant, with one of three ways to grade it."""

from __future__ import annotations

import json
from typing import Annotated, Any, Self, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

from gymsdk import Task

from .records import Records, facts
from .world import World

Answer: TypeAlias = str | int | float
"""The answer to a request: a number, compared by value, or text."""


def without_nulls(value: Any) -> Any:
    """Return the JSON *value* without keys whose value is null. Tabular formats pad nested objects with such keys."""
    if isinstance(value, list):
        return [without_nulls(each) if isinstance(each, (dict, list)) else each for each in value]
    if isinstance(value, dict):
        return {
            key: without_nulls(each) if isinstance(each, (dict, list)) else each
            for key, each in value.items()
            if each is not None
        }
    return value


def _object(given: Any) -> Any:
    return json.loads(given) if isinstance(given, str) else given


class Call(BaseModel):
    """A tool call of a row. The arguments are an object, or an object as JSON text."""

    model_config = ConfigDict(frozen=True)

    name: str
    arguments: Annotated[dict[str, Any], BeforeValidator(_object)] = {}


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

    added: Records = Records()
    removed: Records = Records()
    answer: Answer | None = None
    without_calls: bool = False

    @model_validator(mode="after")
    def _asks(self) -> Self:
        if self.answer is None and not facts(self.added) and not facts(self.removed):
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
    world: World = World()
    expected: Expected | None = None
    plan: Plan | None = None
    offered: list[str] | None = None
    ground_truth: list[Call] | None = None
    ordered: bool = False

    @model_validator(mode="before")
    @classmethod
    def _without_padding(cls, row: Any) -> Any:
        if not isinstance(row, dict):
            return row
        own = cls.model_fields.keys() - Task.model_fields.keys()
        return {key: without_nulls(row[key]) if key in own else row[key] for key in row if _kept(row, key, own)}

    @model_validator(mode="after")
    def _gradable(self) -> Self:
        if self.expected is not None and self.ground_truth is not None:
            raise ValueError("the row has both `expected` and `ground_truth`; keep the one to grade by")
        if self.expected is None and self.ground_truth is None and "get_weather" not in (self.tools or ["get_weather"]):
            raise ValueError("the row has no `ground_truth` and no `expected`; add the one to grade by")
        removed = facts(self.expected.removed) if self.expected is not None else None
        if removed and removed - facts(self.world.records):
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


def _kept(row: dict[str, Any], key: str, own: set[str]) -> bool:
    return key not in own or row[key] is not None
