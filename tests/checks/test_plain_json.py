"""Conversion of any object to comparable plain JSON."""

from __future__ import annotations

from datetime import date
from enum import Enum
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, field_serializer

from gymsdk.checks.subject import find_difference, to_plain


class Colour(Enum):
    RED = "red"


class BrokenModel(BaseModel):
    """A model with a serializer that raises."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    page: Any = 1

    @field_serializer("page")
    def fail(self, _: object) -> str:
        raise RuntimeError


LOOP: list[object] = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("value", "converted"),
    [
        (object(), "<object>"),
        (float("nan"), "nan"),
        (b"\x89\xff", "89ff"),
        ({3, 1, 2}, [1, 2, 3]),
        ({1: "a", (1, 2): "b", None: "c"}, {"1": "a", "1,2": "b", "None": "c"}),
        (Colour.RED, "red"),
        (date(2026, 1, 31), "2026-01-31"),
        (BrokenModel(), {"page": 1}),
        (BrokenModel(page=object()), {"page": "<object>"}),
        (LOOP, ["<list>"]),
        pytest.param(10**5000, hex(10**5000), id="a long number"),
        ("\ud800", "\ud800"),
    ],
)
def test_any_object_is_converted(value, converted):
    assert to_plain(value) == converted


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [
        ({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]}, "a.1.b was 2, then 3"),
        ({"a": 1}, {"a": 1, "b": None}, "b was not there, then None"),
        ({"a": 1, "b": None}, {"a": 1}, "b was None, then not there"),
        ([1], [1, 2], "it was [1], then [1, 2]"),
        (True, 1, "it was True, then 1"),
        (1, 1.0, "it was 1, then 1.0"),
        (1.0, 1.0, None),
        ({"a": None}, {"a": None}, None),
    ],
)
def test_a_difference_has_its_path_and_values(one, other, found):
    assert find_difference(one, other) == found
