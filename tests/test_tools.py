from __future__ import annotations

import datetime as dt
import functools
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal, NewType

import pytest
from pydantic import BaseModel, Field

from gymsdk import State
from gymsdk.tools import (
    InvalidArguments,
    NothingShared,
    build_tool,
    format_error_output,
    format_unknown_tool,
    serialize_output,
)


class Place(BaseModel):
    city: str
    country: str


def forecast(city: str, day: dt.date, unit: str = "celsius", stops: list[Place] | None = None) -> str:
    """Tell the weather.

    For up to ten days.
    """
    return unit


def remember(state: State, task, config, shared, note: str): ...


FORECAST = build_tool(forecast)


def test_parameters_that_the_host_fills_are_never_in_the_schema():
    made = build_tool(remember)
    assert list(made.schema["parameters"]["properties"]) == ["note"]
    assert made.host_parameters == {"state", "task", "config", "shared"}
    with pytest.raises(InvalidArguments, match="state: Extra inputs are not permitted"):
        made.parse_arguments('{"note": "a", "state": {}}')


class Library(State):
    books: int = 3


class Counted:
    """A base class that several states share."""


class Kind(Enum):
    STATE = "state"


Name = NewType("Name", str)


@pytest.mark.parametrize(
    "annotation", [None, Any, object, State, Library, Library | None, Counted, BaseModel, "Missing"]
)
def test_the_host_fills_a_parameter_that_can_hold_its_value(annotation: Any):
    def count(state): ...

    count.__annotations__ = {} if annotation is None else {"state": annotation}
    assert build_tool(count).host_parameters == {"state"}


@pytest.mark.parametrize("name", ["state", "task", "config"])
@pytest.mark.parametrize(
    "annotation",
    [str, "str", str | None, list[str], dict, Place, Kind, Name, Literal["Ohio"], Iterable[str], Annotated[str, 1]],
)
def test_a_policys_parameter_with_the_name_of_a_hosts_parameter_is_rejected(name: str, annotation: Any):
    namespace: dict[str, Any] = {}
    exec(f"def inhabitants({name}=None): ...", namespace)
    namespace["inhabitants"].__annotations__ = {name: annotation}
    with pytest.raises(TypeError, match=f"tool 'inhabitants': a policy cannot give the parameter '{name}'"):
        build_tool(namespace["inhabitants"])


@pytest.mark.parametrize("annotation", [str, str | None])
def test_shared_is_a_parameter_of_the_host_only_if_the_environment_shares_something(annotation: Any):
    def tell(shared): ...

    tell.__annotations__ = {"shared": annotation}
    assert build_tool(tell).host_parameters == {"shared"}
    with pytest.raises(TypeError, match="a policy cannot give the parameter 'shared'"):
        build_tool(tell, NothingShared)


class Point(BaseModel):
    x: float
    limit: float = float("inf")


@dataclass
class Pair:
    first: float
    last: float = float("inf")


def measure(
    number: float = 1.0,
    numbers: list[float] | None = None,
    by_name: dict[str, float] | None = None,
    unique: set[float] | None = None,
    point: Point | None = None,
    pair: Pair | None = None,
    tree: dict[str, list[Point]] | None = None,
    text_or_number: str | float = "",
): ...


@pytest.mark.parametrize("text", ["nan", " NaN ", "-inf", "1e999", "1e_999"])
@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        ('{"number": "TEXT"}', "number"),
        ('{"numbers": [1, "TEXT"]}', "numbers.1"),
        ('{"by_name": {"a": "TEXT"}}', "by_name.a"),
        ('{"unique": ["TEXT"]}', "unique.0"),
        ('{"point": {"x": "TEXT"}}', "point.x"),
        ('{"pair": {"first": "TEXT"}}', "pair.first"),
        ('{"tree": {"a": [{"x": 1}, {"x": "TEXT"}]}}', "tree.a.1.x"),
    ],
)
def test_a_text_is_no_number_if_the_number_is_not_finite(arguments: str, path: str, text: str):
    message = f"Invalid tool call arguments for measure: {path}: Input should be a finite number"
    with pytest.raises(InvalidArguments, match=message):
        build_tool(measure).parse_arguments(arguments.replace("TEXT", text))


def test_texts_defaults_and_other_numbers_stay_as_they_are():
    made = build_tool(measure)
    given = '{"text_or_number": "inf", "point": {"x": "1.5"}, "pair": {"first": 2}, "number": "1e3"}'
    expected = {"text_or_number": "inf", "point": Point(x=1.5), "pair": Pair(2.0), "number": 1000.0}
    assert made.parse_arguments(given) == expected


def test_arguments_are_validated_into_their_types_and_null_means_the_default():
    text = '{"city": "Bern", "day": "2026-01-31", "unit": null, "stops": [{"city": "Aarau", "country": "CH"}]}'
    arguments = FORECAST.parse_arguments(text)
    expected = {"city": "Bern", "day": dt.date(2026, 1, 31), "stops": [Place(city="Aarau", country="CH")]}
    assert (arguments, forecast(**arguments)) == (expected, "celsius")


def test_null_is_a_value_if_there_is_no_default():
    def mark(note: str | None): ...
    def go(city: Annotated[str, Field(description="Where.")] = "Bern"): ...

    assert build_tool(mark).parse_arguments('{"note": null}') == {"note": None}
    assert (build_tool(go).parse_arguments("{}"), build_tool(go).parse_arguments("")) == ({}, {})
    assert build_tool(mark).schema["strict"] is True


DATED = '{"city": "Bern", "day": "2026-01-31", '


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Invalid tool call arguments: unexpected end of data"),
        ("[" * 100_000, "Invalid tool call arguments: "),
        ('"\ud800"', "Invalid tool call arguments: "),
        ("[1]", "Invalid tool call arguments: forecast takes a JSON object"),
        ("{}", "Invalid tool call arguments for forecast: city: Field required; day: Field required"),
        ('{"city": 5, "day": "2026-01-31"}', "for forecast: city: Input should be a valid string"),
        ('{"city": null, "day": "2026-01-31"}', "for forecast: city: Input should be a valid string"),
        ('{"city": "Bern", "day": "2026-02-31"}', "for forecast: day: Input should be a valid date"),
        (DATED + '"town": 1}', "for forecast: town: Extra inputs are not permitted"),
        (DATED + '"stops": [{"city": "Bern"}]}', "for forecast: stops.0.country: Field required"),
    ],
)
def test_invalid_arguments_are_described_for_the_policy(text, message):
    with pytest.raises(InvalidArguments) as caught:
        FORECAST.parse_arguments(text)
    assert message in str(caught.value)


@pytest.mark.parametrize("function", [lambda x: x, functools.partial(forecast, "Bern"), Place, "forecast"])
def test_a_function_without_a_name_cannot_be_a_tool(function):
    with pytest.raises(TypeError, match="has no name that a policy could call; write it as a named function"):
        build_tool(function)


def untyped(city): ...
def starred(*cities: str): ...
def keyed(**cities: str): ...
def positional(city: str, /): ...
def unknown_type(city: Missing): ...  # noqa: F821  # an undefined name on purpose
def unknown_attribute(city: dt.missing): ...
def unserialisable(call: Callable[[], int]): ...
def unvalidatable(lock: functools.partial): ...
def field_default(city: str = Field(description="Where.")): ...


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (untyped, "tool 'untyped': parameter 'city' needs a type; it becomes the tool's schema"),
        (starred, "tool 'starred': parameter 'cities' cannot be passed by name"),
        (keyed, "tool 'keyed': parameter 'cities' cannot be passed by name"),
        (positional, "tool 'positional': parameter 'city' cannot be passed by name"),
        (unknown_type, "tool 'unknown_type': the annotation of 'city' cannot be resolved: name 'Missing' is not d"),
        (unknown_attribute, "tool 'unknown_attribute': the annotation of 'city' cannot be resolved: 'dt.missing'"),
        (unserialisable, "tool 'unserialisable': Cannot generate a JsonSchema for core_schema.CallableSchema"),
        (unvalidatable, "tool 'unvalidatable': Unable to generate pydantic-core schema"),
        (field_default, "tool 'field_default': parameter 'city' has a `Field(...)` as its default; write `Annotated"),
    ],
)
def test_an_unsupported_parameter_is_named(function, message):
    with pytest.raises(TypeError) as caught:
        build_tool(function)
    assert str(caught.value).startswith(message)


def test_a_method_is_a_tool_without_self():
    class World:
        def look(self, where: str): ...

    assert build_tool(World().look).parse_arguments('{"where": "up"}') == {"where": "up"}


IMAGE = {"type": "input_image", "image_url": "data:"}


@pytest.mark.parametrize("value", ["text", "", [IMAGE], [{"type": "input_text", "text": "a"}, IMAGE]])
def test_text_and_content_parts_are_unchanged(value):
    assert serialize_output(value) is value


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "null"),
        ({"a": 1}, '{"a":1}'),
        ([], "[]"),
        ([1, "a"], '[1,"a"]'),
        (Place(city="Bern", country="CH"), '{"city":"Bern","country":"CH"}'),
        ([Place(city="Zürich", country="CH")], '[{"city":"Zürich","country":"CH"}]'),
        ({dt.date(2026, 1, 31): {1}}, '{"2026-01-31":[1]}'),
        ([{"type": "meeting", "with": "Ann"}], '[{"type":"meeting","with":"Ann"}]'),
        ([{"type": ["odd"]}], '[{"type":["odd"]}]'),
    ],
)
def test_other_outputs_are_serialized_as_json(value, expected):
    assert serialize_output(value) == expected


def circular() -> list[Any]:
    ring: list[Any] = []
    ring.append(ring)
    return ring


@pytest.mark.parametrize("value", [object(), {"a": object()}, b"\xff", circular(), ["\ud800"]])
def test_an_output_that_json_does_not_support_raises(value):
    with pytest.raises(TypeError, match="returned a value that JSON does not support"):
        serialize_output(value)


def test_the_message_about_an_unknown_tool_lists_the_available_tools():
    assert format_unknown_tool("getWether", ["getWeather", "stop"]) == (
        "There is no tool named 'getWether'. Did you mean 'getWeather'? Available tools: getWeather, stop."
    )


def test_an_error_output_is_a_json_object_for_any_message():
    assert json.loads(format_error_output('a "b" \ud800')) == {"error": 'a "b" \ud800'}
    assert format_error_output("Zürich") == '{"error": "Zürich"}'
