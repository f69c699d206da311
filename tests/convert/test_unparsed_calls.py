"""Detect servers that do not parse tool calls."""

from __future__ import annotations

import json

import pytest

from gymsdk import responses
from gymsdk.convert import api
from gymsdk.errors import Failed
from gymsdk.types import Item

REQUEST = {"tools": [{"type": "function", "name": "add"}]}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def check(text: str, request: Item = REQUEST, *others: Item, **fields: object) -> None:
    response = (
        responses.build_response([responses.build_reasoning("hmm"), responses.build_message(text), *others], model="m")
        | fields
    )
    api.check_unparsed_calls(response, request, host="here:1")


@pytest.mark.parametrize("text", [CALL, f"I add.\n{CALL}", f"{CALL}\n{CALL}", CALL.replace("\n", "")])
def test_a_valid_call_in_the_text_is_a_server_misconfiguration(text: str) -> None:
    with pytest.raises(
        Failed, match=r"here:1 leaves tool calls.*--enable-auto-tool-choice --tool-call-parser"
    ) as caught:
        check(text)
    assert (caught.value.kind, caught.value.retryable) == ("model_misconfigured", False)


@pytest.mark.parametrize(
    "text",
    [
        "4",
        "<tool_call>",
        CALL.replace("}}", "}"),
        CALL.replace("add", "sub"),
        CALL.replace('{"a": 1}', '"a"'),
        CALL.removesuffix("</tool_call>"),
        f"{CALL}\n<tool_call>{{torn</tool_call>",
        f"{CALL}\n<tool_call>",
        f"```\n{CALL}\n```",
        f"```json\n{CALL}",
        f"write `{CALL.replace(chr(10), '')}` to call it",
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
    ],
)
def test_malformed_or_quoted_calls_stay_text(text: str) -> None:
    check(text)


@pytest.mark.parametrize("request_", [{}, {"tools": []}, REQUEST | {"tool_choice": "none"}])
def test_a_request_without_tools_has_no_unparsed_calls(request_: Item) -> None:
    check(CALL, request_)


def test_an_answer_with_parsed_calls_passes_the_check_and_an_incomplete_one_too() -> None:
    check(CALL, REQUEST, responses.build_function_call("add", "{}"))
    check(CALL, REQUEST, status="incomplete")
    check("4", REQUEST, responses.build_reasoning(CALL))
    # Many calls that do not end take linear time.
    check("<tool_call>" * 200_000 + "`" * 200_000 + json.dumps({}))


@pytest.mark.parametrize(
    ("text", "flag"),
    [
        ('"auto" tool choice requires --enable-auto-tool-choice to be set', "--tool-call-parser"),
        ('tool_choice="required" requires --tool-call-parser to be set', "--enable-auto-tool-choice"),
        ("Internal server error: Unsupported tool_call_parser: None", "start SGLang with --tool-call-parser"),
        ("tools param requires --jinja flag", "llama-server with --jinja"),
        ("registry.ollama.ai/library/llama3:8b does not support tools", "ollama show"),
    ],
)
def test_an_error_about_tools_suggests_the_server_flag(text: str, flag: str) -> None:
    assert flag in (api.suggest_tool_fix(text) or "")


@pytest.mark.parametrize("text", ["", "no such tool", "temperature must be positive"])
def test_other_errors_suggest_no_flag(text: str) -> None:
    assert api.suggest_tool_fix(text) is None
