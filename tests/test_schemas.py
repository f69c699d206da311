"""The JSON schemas that gymsdk derives from the parameters of a tool."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from gymsdk.tools import build_tool


class Place(BaseModel):
    city: str
    title: Annotated[str, Field(description="As on the map.")]


class Trip(BaseModel):
    stops: list[Place]


class WithDefault(BaseModel):
    city: str = "Bern"


class WithExtraKeys(BaseModel):
    model_config = ConfigDict(extra="allow")

    city: str


class Tree(BaseModel):
    branches: list[Tree]


def build_schemas(annotation, **default):
    """Return the schema of a parameter with this annotation, and the schema of the whole tool."""

    def tool(value): ...

    tool.__annotations__ = {"value": annotation}
    tool.__defaults__ = tuple(default.values()) or None
    schema = build_tool(tool).schema
    return schema["parameters"]["properties"]["value"], schema


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        (str, {"type": "string"}),
        (float | None, {"anyOf": [{"type": "number"}, {"type": "null"}]}),
        (list[int], {"type": "array", "items": {"type": "integer"}}),
        (Literal["a", "b"], {"type": "string", "enum": ["a", "b"]}),
        (Annotated[str, Field(description="Where.")], {"type": "string", "description": "Where."}),
        (Annotated[int, Field(ge=1, le=9)], {"type": "integer", "minimum": 1, "maximum": 9}),
        (Tree, {"$ref": "#/$defs/Tree"}),
        (
            Annotated[Place, Field(description="Where.")],
            {"description": "Where.", "anyOf": [{"$ref": "#/$defs/Place"}]},
        ),
    ],
)
def test_a_required_argument_has_a_strict_schema(annotation, expected):
    node, schema = build_schemas(annotation)
    assert node == expected
    assert schema["strict"] is True
    assert schema["parameters"]["required"] == ["value"]
    assert schema["parameters"]["additionalProperties"] is False


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        (str, {"type": ["string", "null"]}),
        (Annotated[str, Field(description="Where.")], {"type": ["string", "null"], "description": "Where."}),
        (int | str, {"anyOf": [{"type": "integer"}, {"type": "string"}, {"type": "null"}]}),
        (int | None, {"anyOf": [{"type": "integer"}, {"type": "null"}]}),
        (Literal["a", "b"], {"anyOf": [{"type": "string", "enum": ["a", "b"]}, {"type": "null"}]}),
        (
            Annotated[Place, Field(description="Where.")],
            {"description": "Where.", "anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]},
        ),
    ],
)
def test_an_argument_with_a_default_is_required_and_nullable(annotation, expected):
    node, schema = build_schemas(annotation, default=None)
    assert node == expected
    assert schema["strict"] is True
    assert schema["parameters"]["required"] == ["value"]


def test_a_nested_model_with_required_fields_forbids_additional_properties():
    node, schema = build_schemas(Trip)
    assert node == {"$ref": "#/$defs/Trip"}
    assert schema["strict"] is True
    title = {"type": "string", "description": "As on the map."}
    trip = {"properties": {"stops": {"type": "array", "items": {"$ref": "#/$defs/Place"}}}, "required": ["stops"]}
    place = {"properties": {"city": {"type": "string"}, "title": title}, "required": ["city", "title"]}
    both = {"type": "object", "additionalProperties": False}
    assert schema["parameters"]["$defs"] == {"Trip": both | trip, "Place": both | place}


@pytest.mark.parametrize(
    "annotation",
    [
        *(dict[str, int], dict, Any, list, tuple[int, str], set[str], WithDefault, WithExtraKeys, list[WithDefault]),
        Annotated[str, Field(examples=["Bern"])],
        Annotated[str, Field(json_schema_extra={"format": "colour"})],
    ],
)
def test_a_type_that_strict_mode_cannot_express_has_a_schema_that_is_not_strict(annotation):
    node, schema = build_schemas(annotation, default=None)
    assert schema["strict"] is False
    assert "required" not in schema["parameters"]
    assert "title" not in node


def test_an_argument_called_title_or_properties_keeps_its_name():
    def file(title: str, properties: str, type: str): ...

    assert list(build_tool(file).schema["parameters"]["properties"]) == ["title", "properties", "type"]
