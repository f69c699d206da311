from __future__ import annotations

from enum import Enum
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from gymsdk.tools import build_tool


class Unit(Enum):
    C = "celsius"
    F = "fahrenheit"


class Place(BaseModel):
    city: str
    title: Annotated[str, Field(description="As on the map.")]


class Trip(BaseModel):
    stops: list[Place]


class Loose(BaseModel):
    city: str = "Bern"


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")

    city: str


class Tree(BaseModel):
    branches: list[Tree]


def shown(kind, **default):
    """Return the schema of a parameter with this annotation, and the schema of the whole tool."""

    def one(value): ...

    one.__annotations__ = {"value": kind}
    one.__defaults__ = tuple(default.values()) or None
    schema = build_tool(one).schema
    return schema["parameters"]["properties"]["value"], schema


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (str, {"type": "string"}),
        (int, {"type": "integer"}),
        (float | None, {"anyOf": [{"type": "number"}, {"type": "null"}]}),
        (list[int], {"type": "array", "items": {"type": "integer"}}),
        (Literal["a", "b"], {"type": "string", "enum": ["a", "b"]}),
        (Annotated[str, Field(description="Where.")], {"type": "string", "description": "Where."}),
        (Annotated[int, Field(ge=1, le=9)], {"type": "integer", "minimum": 1, "maximum": 9}),
        (Unit, {"$ref": "#/$defs/Unit"}),
    ],
)
def test_a_required_argument_has_a_strict_schema(kind, expected):
    node, schema = shown(kind)
    assert node == expected
    assert schema["strict"] is True
    assert schema["parameters"]["required"] == ["value"]
    assert schema["parameters"]["additionalProperties"] is False


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (str, {"type": ["string", "null"]}),
        (Annotated[str, Field(description="Where.")], {"type": ["string", "null"], "description": "Where."}),
        (list[int], {"type": ["array", "null"], "items": {"type": "integer"}}),
        (int | str, {"anyOf": [{"type": "integer"}, {"type": "string"}, {"type": "null"}]}),
        (int | None, {"anyOf": [{"type": "integer"}, {"type": "null"}]}),
        (Literal["a", "b"], {"anyOf": [{"type": "string", "enum": ["a", "b"]}, {"type": "null"}]}),
        (Literal["a"], {"anyOf": [{"type": "string", "const": "a"}, {"type": "null"}]}),
        (
            Annotated[Place, Field(description="Where.")],
            {"description": "Where.", "anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]},
        ),
    ],
)
def test_a_defaulted_argument_is_required_and_nullable(kind, expected):
    node, schema = shown(kind, default=None)
    assert node == expected
    assert schema["strict"] is True
    assert schema["parameters"]["required"] == ["value"]


def test_a_nested_model_that_requires_all_its_fields_is_closed():
    node, schema = shown(Trip)
    assert node == {"$ref": "#/$defs/Trip"}
    assert schema["strict"] is True
    assert schema["parameters"]["$defs"] == {
        "Trip": {
            "type": "object",
            "properties": {"stops": {"type": "array", "items": {"$ref": "#/$defs/Place"}}},
            "required": ["stops"],
            "additionalProperties": False,
        },
        "Place": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "title": {"type": "string", "description": "As on the map."},
            },
            "required": ["city", "title"],
            "additionalProperties": False,
        },
    }


def test_a_reference_with_a_description_is_wrapped():
    node, _ = shown(Annotated[Place, Field(description="Where.")])
    assert node == {"description": "Where.", "anyOf": [{"$ref": "#/$defs/Place"}]}


def test_a_recursive_model_has_a_strict_schema():
    assert shown(Tree)[1]["strict"] is True


@pytest.mark.parametrize(
    "kind",
    [
        dict[str, int],
        dict,
        Any,
        list,
        tuple[int, str],
        set[str],
        Loose,
        Open,
        list[Loose],
        Annotated[str, Field(examples=["Bern"])],
        Annotated[str, Field(json_schema_extra={"format": "colour"})],
    ],
)
def test_types_that_strict_mode_cannot_express_are_not_strict(kind):
    node, schema = shown(kind, default=None)
    assert schema["strict"] is False
    assert "required" not in schema["parameters"]
    assert "title" not in node


def test_an_argument_called_title_or_properties_keeps_its_name():
    def file(title: str, properties: str, type: str): ...

    assert list(build_tool(file).schema["parameters"]["properties"]) == ["title", "properties", "type"]
