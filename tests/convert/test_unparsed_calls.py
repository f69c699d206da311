"""Servers without a parser for tool calls are detected."""

from __future__ import annotations

import json

import pytest

from gymsdk import responses
from gymsdk.convert import api
from gymsdk.errors import Failed
from gymsdk.types import Item

ASKED = {"tools": [{"type": "function", "name": "add"}]}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def check(text: str, request: Item = ASKED, *others: Item, **fields: object) -> None:
    response = (
        responses.build_response([responses.build_reasoning("hmm"), responses.build_message(text), *others], model="m")
        | fields
    )
    api.check_unparsed_calls(response, request, host="here:1")


@pytest.mark.parametrize("text", [CALL, f"I add.\n{CALL}", f"{CALL}\n{CALL}", CALL.replace("\n", "")])
def test_a_sound_call_in_the_text_is_the_servers_fault(text: str) -> None:
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
def test_what_the_policy_did_wrong_or_quotes_stays_text(text: str) -> None:
    check(text)


@pytest.mark.parametrize("request_", [{}, {"tools": []}, ASKED | {"tool_choice": "none"}])
def test_without_tools_to_call_nothing_is_a_call(request_: Item) -> None:
    check(CALL, request_)


def test_an_answer_with_calls_comes_from_a_server_that_reads_them() -> None:
    check(CALL, ASKED, responses.build_function_call("add", "{}"))


def test_an_answer_cut_short_is_not_held_to_anything() -> None:
    check(CALL, ASKED, status="incomplete")


def test_a_call_within_the_thoughts_is_a_thought() -> None:
    response = responses.build_response([responses.build_reasoning(CALL), responses.build_message("4")], model="m")
    api.check_unparsed_calls(response, ASKED, host="here:1")


def test_many_opened_calls_cost_no_more_than_their_length() -> None:
    check("<tool_call>" * 200_000 + "`" * 200_000 + json.dumps({}))


@pytest.mark.parametrize(
    ("text", "flag"),
    [
        (
            '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set',
            "--tool-call-parser",
        ),
        ('tool_choice="required" requires --tool-call-parser to be set', "--enable-auto-tool-choice"),
        ("Internal server error: Unsupported tool_call_parser: None", "start SGLang with --tool-call-parser"),
        ("tools param requires --jinja flag", "llama-server with --jinja"),
        ("registry.ollama.ai/library/llama3:8b does not support tools", "ollama show"),
    ],
)
def test_a_refusal_of_tools_is_answered_with_the_flag(text: str, flag: str) -> None:
    assert flag in (api.suggest_tool_fix(text) or "")


@pytest.mark.parametrize("text", ["", "no such tool", "temperature must be positive"])
def test_another_refusal_is_not_about_tools(text: str) -> None:
    assert api.suggest_tool_fix(text) is None
