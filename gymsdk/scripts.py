"""A script: what a policy says, a line of a file for each turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from gymsdk import rows, wire
from gymsdk.complaints import place, said
from gymsdk.errors import BadRow
from gymsdk.transcript import Item

SHAPES = {
    "dict_type": "an object, or its text",
    "model_type": "an object",
    "string_type": "a text",
    "tuple_type": "a list",
}
"""What pydantic calls a value of the wrong shape, and what it must be in a script."""


class Called(BaseModel):
    """A call in a script, its arguments an object, or verbatim text."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    arguments: dict[str, Any] | str = {}


class Line(BaseModel):
    """A turn of a script; *when* that is in what the policy was told last, this line goes before the others."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    text: str = ""
    reasoning: str = ""
    calls: tuple[Called, ...] = ()
    when: str | None = None

    @model_validator(mode="after")
    def _says(self) -> Self:
        if not self.model_fields_set - {"when"}:
            raise ValueError('it says nothing; write {"text": ""} for an empty answer')
        return self

    def build_items(self, turn: int) -> list[Item]:
        """Give the output items, with the ids that are those of the *turn*."""
        found = [wire.reasoning(self.reasoning, id=f"rs_{turn}")] if self.reasoning else []
        if self.text or not self.calls:
            found.append(wire.message(self.text, id=f"msg_{turn}"))
        return found + [
            wire.function_call(call.name, call.arguments, f"call_{turn}_{n}", id=f"fc_{turn}_{n}")
            for n, call in enumerate(self.calls)
        ]


def read(path: Path) -> list[Line]:
    """Give the lines of the script at *path*; raises `BadRow` at one that is none."""
    found = []
    for number, row in rows.read(path):
        try:
            found.append(Line.model_validate(row))
        except ValidationError as error:
            told = f"{path}:{number}: {_complaint(error)}; a line has text, reasoning, calls, when"
            raise BadRow(told) from None
    return found


def _complaint(error: ValidationError) -> str:
    """What is wrong first with a line, in the words of who writes one."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where, kind = place(first), first["type"]
    if kind == "extra_forbidden":
        return f"nothing is called {where!r} there"
    if kind == "missing":
        return f"{where} is missing"
    if kind in SHAPES:
        # Of a choice of types, the last of the place is pydantic's name for one.
        return f"{where.removesuffix('.str').removesuffix('.dict[str,any]')} must be {SHAPES[kind]}"
    return f"{where}: {said(first)}" if where else said(first)
