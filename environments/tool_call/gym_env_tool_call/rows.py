"""The row: a request to an assistant, and one of three ways to say what a right end is."""

from __future__ import annotations

import json
from typing import Annotated, Any, Self, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

from gymsdk import Task

from .records import Records, facts
from .world import World

Answer: TypeAlias = str | int | float
"""What a request asks for: a number, compared by value, or text."""


def without_nulls(value: Any) -> Any:
    """Give JSON *value* without the keys that are null: tables of rows pad nested objects with them."""
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
    """A tool call of a row; its arguments are an object, or that object as JSON text."""

    model_config = ConfigDict(frozen=True)

    name: str
    arguments: Annotated[dict[str, Any], BeforeValidator(_object)] = {}


class Plan(BaseModel):
    """A way to the right end: *calls* in order, then *answer*.

    Text in either may refer to what an earlier call gave: `{0.contacts.1.phone}` is the phone number of the
    second contact in the output of the first call.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    calls: list[Call] = []
    answer: Answer | None = None


class Expected(BaseModel):
    """How a request should end: the records that are new, the records that are gone, the answer given.

    *without_calls* says that nothing has to be looked up or done, so that any call is one too many.
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
    """A row of tool_call, of one of three sorts.

    With *expected* it plays in *world* and is graded on how that ends; *plan* is a way there, *offered* the tools
    the policy is given. With *ground_truth* it is graded by the calls made, in any order unless *ordered*. With
    neither it asks for the weather.
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
            raise ValueError("`expected.removed` holds what `world.records` does not; nobody could remove it")
        return self

    @property
    def tools(self) -> list[str]:
        """The names of the tools the row itself brings."""
        return [str(tool.get("name", "")) for tool in self.responses_create_params.get("tools") or []]

    @property
    def one_at_a_time(self) -> bool:
        """Whether a turn may hold no more than one call."""
        return self.responses_create_params.get("parallel_tool_calls") is False


def _kept(row: dict[str, Any], key: str, own: set[str]) -> bool:
    return key not in own or row[key] is not None
