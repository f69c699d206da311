"""Options of a command from the fields of pydantic models."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from pydantic import AfterValidator, BaseModel, Field
from typer.testing import CliRunner

from gymsdk.cli.fields import Changed, Given, Only, Without, list_options, take_models
from gymsdk.settings import LIMITS, RUN, Flag


def check_even(value: int) -> int:
    if value % 2:
        raise ValueError("an odd number")
    return value


class Inner(BaseModel):
    size: Annotated[int, Flag(LIMITS, "N", ("--most",), layered=True)] = Field(5, ge=1, description="The size.")
    folder: Annotated[Path, Flag(RUN, layered=True)] = Field(description="The folder.")


class Outer(BaseModel):
    count: Annotated[int, Flag(RUN, "C", ("--count", "-c"))] = Field(2, ge=1, le=9, description="The count.")
    even: Annotated[int, AfterValidator(check_even), Flag(RUN)] = Field(0, description="An even number.")
    seconds: Annotated[float, Flag(LIMITS, least=0.5)] = Field(3.0, gt=0, description="The seconds.")
    kind: Annotated[Literal["a", "b"] | None, Flag(RUN)] = Field(None, description="The kind.")
    loud: Annotated[bool, Flag(RUN)] = Field(False, description="Loud.")
    words: Annotated[tuple[str, ...], Flag(RUN)] = Field((), description="Words.")
    pairs: Annotated[Mapping[str, Any], Flag(RUN, "KEY=VALUE", ("--pair",))] = Field({}, description="Pairs.")
    tidy: Annotated[bool, Flag(RUN, names=("--tidy/--no-tidy",))] = Field(True, description="Tidy.")
    share: Annotated[float, Flag(RUN)] = Field(1.0, ge=0, allow_inf_nan=True, description="The share.")
    hidden: int = 7
    inner: Inner | None = None


received: dict[str, Any] = {}


def use(**values: Any) -> None:
    received.clear()
    received.update(values)


def with_model(name: str = "x", *, outer: Annotated[Outer, Without("size", "folder")]) -> None:
    """Take the model."""
    use(name=name, outer=outer)


def with_given(*, given: Given[Outer]) -> None:
    """Take what is given."""
    use(given=given)


def with_changes(
    *, given: Annotated[Given[Outer], Only("seconds", "count"), Changed(count={"default": 4, "help": "Changed."})]
) -> None:
    """Take some fields."""
    use(given=given)


def run(function: Callable[..., None], *arguments: str) -> tuple[int, str]:
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)
    app.command()(take_models(function))
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    return result.exit_code, result.output


def test_a_model_is_validated_from_its_options() -> None:
    assert run(with_model, "--count", "3", "--kind", "b", "--loud", "--words", "u", "--words", "v") == (0, "")
    assert received == {"name": "x", "outer": Outer(count=3, kind="b", loud=True, words=("u", "v"))}


def test_an_option_has_a_negative_form_and_takes_infinite_numbers_if_its_field_says_so() -> None:
    assert run(with_model, "--no-tidy", "--share", "inf") == (0, "")
    assert (received["outer"].tidy, received["outer"].share) == (False, math.inf)
    assert run(with_model, "--share", "-inf")[0] == 2


def test_given_contains_what_the_user_has_set_nested_like_the_model() -> None:
    assert run(with_given, "-c", "3", "--most", "8", "--folder", "there", "--pair", "a=1") == (0, "")
    given = received["given"]
    assert given["inner"] == {"size": 8, "folder": Path("there")}
    assert (given["count"], given["pairs"], "kind" in given, "words" in given) == (3, ["a=1"], False, False)
    run(with_given)
    assert "inner" not in received["given"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--count", "0"), "'--count' / '-c'"),
        (("--count", "10"), "'--count' / '-c'"),
        (("--even", "3"), "'--even': an odd number"),
        (("--seconds", "0.4"), "'--seconds'"),
        (("--seconds", "inf"), "'--seconds': inf is not a finite number"),
        (("--kind", "c"), "'--kind'"),
        (("--no-loud",), "--no-loud"),
        (("--hidden", "3"), "--hidden"),
    ],
)
def test_a_wrong_value_is_an_error_that_names_the_option(arguments: tuple[str, ...], message: str) -> None:
    code, output = run(with_model, *arguments)
    # Older versions of Typer add the name of an environment variable that does not exist.
    assert (code, message in output.replace(" (env var: 'None')", "")) == (2, True), output


def test_a_command_chooses_and_changes_fields() -> None:
    assert run(with_changes)[0] == 0
    assert received == {"given": {"seconds": 3.0, "count": 4}}
    code, output = run(with_changes, "--help")
    assert (code, "Changed." in output, "--even" in output) == (0, True, False)
    assert output.index("--seconds") < output.index("--count")


def test_the_help_shows_the_defaults_of_layered_fields_in_parentheses() -> None:
    _, output = run(with_given, "--help")
    assert "[default: (5); x>=1]" in output
    assert "[default: 2; 1<=x<=9]" in output
    assert "--pair KEY=VALUE" in output


def test_options_are_listed_as_the_user_wrote_them() -> None:
    listed = list_options(Outer, {"count": 3, "loud": True, "words": ["u", "v"]})
    assert listed == {
        **dict.fromkeys(("--even", "--seconds", "--kind", "--pair", "--tidy", "--share", "--most", "--folder")),
        "--count": "3",
        "--loud": "",
        "--words": "u,v",
    }
