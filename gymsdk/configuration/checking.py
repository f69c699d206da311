"""Checking: values held to what is declared, each complaint told at its place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from gymsdk.complaints import said
from gymsdk.configuration.nodes import Node, plain
from gymsdk.configuration.places import Problems, Trail, dotted

M = TypeVar("M", bound=BaseModel)


def checked(
    kind: type[M], values: dict[str, Any], *, keys: dict[str, str], root: Node, trail: Trail, problems: Problems
) -> M | None:
    """Give *values* as *kind*, `None` where they do not fit; *keys* says how a field is called under *trail*."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        # Never the value: it may be a key.
        for complaint in error.errors(include_input=False, include_url=False, include_context=False):
            field, *deeper = map(str, complaint["loc"] or ("",))
            way = (*trail, *keys.get(field, field).split("."), *deeper)
            words = said(complaint)
            problems.add(root.place_of(way), f"{dotted(way)}: {words[:1].lower()}{words[1:]}")
        return None


def is_given(node: Node | None) -> bool:
    """Whether *node* is there and says something."""
    return node is not None and node.value is not None


def given(node: Node, called: Mapping[str, str]) -> dict[str, Any]:
    """Give what *node* says of each field, by what the field is *called* there."""
    there = {field: node.children[key] for field, key in called.items() if key in node.children}
    return {field: plain(each) for field, each in there.items() if each.value is not None}
