"""Every exception of the package is in one tree, so that `except GymsdkError` catches all that a caller may see."""

from __future__ import annotations

import ast
import importlib
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError
from test_layers import parse_modules

from gymsdk import errors, jsonl, tools
from gymsdk.errors import GymsdkError

CAUGHT_INSIDE = {
    "BadEncoding": "the reader of a body turns it into the error of a request or of a call",
    "BuildFailed": "the check of the package turns it into a finding",
    "CheckFailed": "a check turns it into a result, and the pytest plugin into the report of a test",
    "CheckSkipped": "a check of an engine turns it into a result",
    "ContextOverflow": "the model server turns it into an error response",
    "EngineRefusal": "the endpoint turns the engine's answer into a response or an error",
    "GoldUnreadable": "the grader turns it into a reason; it is a ValueError of its Python API",
    "InvalidResponse": "the HTTP client treats it as any error of aiohttp, from which it derives",
    "NotApplicable": "a check turns it into a result",
    "OutputLimitRefused": "the endpoint asks again with a smaller limit",
    "RequestRejected": "the application turns it into an error response",
    "RolloutFailed": "the agent server turns it into an error response",
    "RpcError": "the tool server turns it into an error response",
    "ServerOverloaded": "the application turns it into an error response",
    "Stopped": "it must pass every `except Exception` of an environment, as Ctrl-C does",
    "TooComplex": "the reader of a body turns it into the error of a request or of a call",
    "TooLarge": "the reader of a body or the grader turns it into an error or a reason",
    "TooSlow": "the checks turn it into a result",
    "Undecidable": "the grader turns it into a reason",
    "Undefined": "the grader turns it into a reason",
    "Unreadable": "the grader turns it into a reason",
    "_DifferenceError": "hypothesis looks for a smaller example, and the check turns it into a finding",
    "_NotStrictError": "the schema of the tool is then not strict",
    "_PasswordRequired": "the loader of the key turns it into a UsageError",
    "_StartFailed": "the supervisor turns it into a failed start",
    "_WorkerNotReadyError": "another worker runs the call",
}
"""The exceptions that no caller sees, with the reason."""

OPTIONAL = {"exporters", "ray", "trl"}
"""Packages that need an extra."""


def exceptions_of(name: str) -> list[type[BaseException]]:
    module = importlib.import_module(name)
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, BaseException) and value.__module__ == name
    ]


def iter_defined() -> Iterator[type[BaseException]]:
    """Yield all exception classes of the package, without the modules whose packages are not installed here."""
    for module, tree in parse_modules().items():
        if module != "__main__" and any(isinstance(node, ast.ClassDef) and node.bases for node in tree.body):
            try:
                yield from exceptions_of(f"gymsdk.{module}")
            except ModuleNotFoundError:
                assert module.split(".")[0] in OPTIONAL


@pytest.mark.slow
def test_every_exception_is_in_the_tree_or_never_reaches_a_caller() -> None:
    outside = {kind.__name__ for kind in iter_defined() if not issubclass(kind, GymsdkError)}
    assert outside - CAUGHT_INSIDE.keys() == set(), "derive it from GymsdkError, or say who catches it"
    assert CAUGHT_INSIDE.keys() - outside == set(), "remove it from the list"


def test_the_drawn_tree_has_every_exception_of_its_module() -> None:
    drawn = set(re.findall(r"^(?:GymsdkError|[│ ]*[├└]── (\w+))", errors.__doc__, re.MULTILINE)) - {""}
    assert drawn == {kind.__name__ for kind in exceptions_of("gymsdk.errors")} - {"GymsdkError"}


def test_exceptions_that_joined_the_tree_are_still_those_of_python() -> None:
    for kind in (ValueError, RecursionError):
        assert issubclass(jsonl.NestingError, kind)
    assert issubclass(tools.InvalidArguments, ValueError)


@pytest.mark.parametrize("kind", [kind for kind in vars(errors).values() if isinstance(kind, type)])
def test_an_exception_is_unchanged_between_processes(kind: type) -> None:
    if issubclass(kind, errors.EpisodeError):
        fields = {"kind": "model_rate_limited", "retryable": True, "stage": "model", "retry_after": 2.5}
        raised: Exception = kind("broken", **fields)
        assert vars(raised).items() >= fields.items()
    elif issubclass(kind, Exception):
        raised = kind("broken")
    else:
        return
    copy = pickle.loads(pickle.dumps(raised))
    assert (type(copy), str(copy), vars(copy)) == (kind, "broken", vars(raised))


def test_an_error_in_code_without_a_file_is_described_inside_a_package_folder_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ZeroDivisionError) as error:
        exec("1 / 0", {})
    assert errors.describe_exception(error.value).startswith("ZeroDivisionError: division by zero (")


@pytest.mark.parametrize("value", [457, 1.1, False])
def test_a_number_in_place_of_a_text_asks_for_quotes(value: object) -> None:
    class Settings(BaseModel):
        name: str

    with pytest.raises(ValidationError) as caught:
        Settings.model_validate({"name": value})
    [(location, message)] = errors.list_setting_errors(caught.value)
    assert location == ("name",)
    assert message.endswith("; if the text itself is meant, put it in quotes")
