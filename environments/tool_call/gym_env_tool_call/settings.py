"""The settings: the kinds of request to generate, and their difficulty."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from gymsdk import Config

from .requests import KINDS, mixtures

MOST_CALLS = 5


def _divided(given: object) -> object:
    """Split a list in the notation of the command line: `weather,exchange`."""
    return [each.strip() for each in given.split(",")] if isinstance(given, str) else given


class Settings(Config):
    """Which requests to generate.

    Attributes:
        calls: The lowest and the highest number of calls that a request needs.
        kinds: The kinds of request to draw from. Empty: all kinds.
        distractors: The number of offered tools that a request does not need. `None`: offer all tools.
    """

    calls: Annotated[tuple[int, int], BeforeValidator(_divided)] = (0, MOST_CALLS)
    kinds: Annotated[tuple[str, ...], BeforeValidator(_divided)] = Field(default=(), validate_default=True)
    distractors: int | None = Field(default=None, ge=0)

    @field_validator("calls")
    @classmethod
    def _needed(cls, calls: tuple[int, int]) -> tuple[int, int]:
        if not mixtures(calls, ()):
            raise ValueError(f"no request needs {calls[0]} to {calls[1]} calls; give numbers from 0 to {MOST_CALLS}")
        return calls

    @field_validator("kinds")
    @classmethod
    def _possible(cls, kinds: tuple[str, ...], others: ValidationInfo) -> tuple[str, ...]:
        if unknown := set(kinds) - KINDS.keys():
            raise ValueError(f"no kind of request is named {min(unknown)!r}; the kinds: {', '.join(sorted(KINDS))}")
        calls = others.data.get("calls")
        if calls and not mixtures(calls, kinds):
            raise ValueError(f"no request of these kinds needs {calls[0]} to {calls[1]} calls; widen `calls`")
        return kinds
