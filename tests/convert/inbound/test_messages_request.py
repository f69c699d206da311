"""Convert Anthropic Messages bodies to Responses requests."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from gymsdk import responses
from gymsdk.convert import anthropic
from gymsdk.convert.api import InvalidRequest
from gymsdk.types import Item

TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
IMAGE_PART = {"type": "input_image", "image_url": "data:image/png;base64,aGk=", "detail": "auto"}
TOKENS = {"prompt_token_ids": [1, 2], "generation_token_ids": [3], "generation_log_probs": [-0.5]}


def parse(*messages: Item, **fields: Any) -> Item:
    history = list(messages) or [{"role": "user", "content": "hi"}]
    return anthropic.parse_request({"model": "m", "max_tokens": 9, "messages": history} | fields)


def items(*messages: Item) -> list[Item]:
    return [{key: value for key, value in item.items() if key != "id"} for item in parse(*messages)["input"]]


def text(*texts: str) -> list[Item]:
    return [{"type": "input_text", "text": text} for text in texts]


def block(text: str) -> Item:
    return {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}


def test_a_string_is_one_text_block() -> None:
    assert parse() == {"model": "m", "max_output_tokens": 9, "input": [{"role": "user", "content": text("hi")}]}
    assert items({"role": "user", "content": "hi"}) == items({"role": "user", "content": [block("hi")]})


def test_an_image_becomes_a_data_url_or_keeps_its_url() -> None:
    linked = {"type": "image", "source": {"type": "url", "url": "http://a/b.png"}}
    (said,) = items({"role": "user", "content": [IMAGE, linked, block("what?")]})
    assert said["content"] == [IMAGE_PART, IMAGE_PART | {"image_url": "http://a/b.png"}, *text("what?")]


def test_a_text_document_becomes_its_title_context_and_text() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "D"}
    document = {"type": "document", "source": source, "title": "T", "context": "C"}
    nested = {"type": "document", "source": {"type": "content", "content": [block("N"), IMAGE]}}
    (said,) = items({"role": "user", "content": [document, nested]})
    assert said["content"] == [*text("T", "C", "D", "N"), IMAGE_PART]


def test_tool_results_become_items_and_keep_their_position() -> None:
    results = [{"type": "tool_result", "tool_use_id": name, "content": name.upper()} for name in "ab"]
    said = items({"role": "user", "content": [*results, block("go"), IMAGE, results[0]]})
    answers = [responses.build_function_call_output(name, name.upper()) for name in "ab"]
    assert said == [*answers, {"role": "user", "content": [*text("go"), IMAGE_PART]}, answers[0]]


@pytest.mark.parametrize(
    ("content", "output", "of_an_error"),
    [
        (None, "", "Error: "),
        ([], "", "Error: "),
        ("4", "4", "Error: 4"),
        ("Error: no such file", "Error: no such file", "Error: no such file"),
        ([block("4")], "4", "Error: 4"),
        ([block("4"), block("5")], text("4", "5"), text("Error: ", "4", "5")),
        ([IMAGE], [IMAGE_PART], [*text("Error: "), IMAGE_PART]),
    ],
)
def test_a_tool_result_is_text_or_parts_and_that_of_an_error_says_so(
    content: Any, output: Any, of_an_error: Any
) -> None:
    result = {"type": "tool_result", "tool_use_id": "c", "content": content}
    said = items({"role": "user", "content": [result, result | {"is_error": True}]})
    assert said == [responses.build_function_call_output("c", found) for found in (output, of_an_error)]


def test_an_assistant_turn_becomes_reasoning_text_and_calls() -> None:
    thinking = {"type": "thinking", "thinking": "hmm", "signature": "c2lnbmVk"}
    call = {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1, "b": "ü"}}
    said = items({"role": "assistant", "content": [thinking, block("I add."), call, call | {"id": "c2"}]})
    expected = [
        responses.build_reasoning("hmm"),
        responses.build_message("I add."),
        responses.build_function_call("add", '{"a": 1, "b": "ü"}', "c1"),
        responses.build_function_call("add", '{"a": 1, "b": "ü"}', "c2"),
    ]
    assert said == [{key: value for key, value in item.items() if key != "id"} for item in expected]


def test_encrypted_reasoning_of_another_service_is_dropped() -> None:
    hidden = {"type": "redacted_thinking", "data": "EmwKAhgBEgy3va3pzix"}
    assert [item["type"] for item in items({"role": "assistant", "content": [hidden, block("4")]})] == ["message"]


@pytest.mark.parametrize("signature", ["", "{", "[1]", '{"id": 1}', "{\ud800}", None])
def test_reasoning_with_a_foreign_signature_is_kept(signature: str | None) -> None:
    thinking = {"type": "thinking", "thinking": "hmm", "signature": signature}
    (said,) = items({"role": "assistant", "content": [thinking]})
    assert said["summary"] == [{"type": "summary_text", "text": "hmm"}]


def test_token_ids_of_a_block_stay_on_its_item() -> None:
    call = {"type": "tool_use", "id": "c", "name": "add", "input": {}}
    said = items({"role": "assistant", "content": [block("I add."), call | TOKENS]})
    assert not TOKENS.keys() & said[0].keys()
    assert TOKENS.items() <= said[1].items()


@pytest.mark.parametrize("system", ["Be brief.", [block("Be brief.")], [block(""), block("Be brief.")]])
def test_the_system_prompt_becomes_the_instructions(system: Any) -> None:
    assert parse(system=system)["instructions"] == "Be brief."


def test_a_billing_header_is_removed_from_the_instructions() -> None:
    billing = "x-anthropic-billing-header: cc_version=2.1; cch=eb6c6;"
    apart, together = parse(system=[block(billing), block("A"), block("B")]), parse(system=f"{billing}\nA\n\nB")
    assert apart["instructions"] == together["instructions"] == "A\n\nB"


def test_a_system_message_keeps_its_position() -> None:
    said = items({"role": "user", "content": "a"}, {"role": "system", "content": "b"}, {"role": "user", "content": "c"})
    expected = [("user", text("a")), ("system", text("b")), ("user", text("c"))]
    assert [(item["role"], item["content"]) for item in said] == expected


def test_tools_become_functions() -> None:
    function = {"type": "function", "name": "add", "description": "Adds.", "parameters": {"type": "object"}}
    request = parse(tools=[TOOL | {"cache_control": {}}, TOOL | {"type": "custom", "strict": True}])["tools"]
    assert request == [function | {"strict": False}, function | {"strict": True}]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "tool", "name": "add"}, {"tool_choice": {"type": "function", "name": "add"}}),
        ({"type": "auto", "disable_parallel_tool_use": False}, {"tool_choice": "auto"}),
        (
            {"type": "any", "disable_parallel_tool_use": True},
            {"tool_choice": "required", "parallel_tool_calls": False},
        ),
    ],
)
def test_the_tool_choice_is_converted(choice: Item, expected: Item) -> None:
    request = parse(tools=[TOOL], tool_choice=choice)
    assert {key: request[key] for key in ("tool_choice", "parallel_tool_calls") if key in request} == expected


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "low"),
        ({"thinking": {"type": "enabled", "budget_tokens": 4096}}, "medium"),
        ({"thinking": {"type": "enabled", "budget_tokens": 16384}}, "high"),
        ({"thinking": {"type": "adaptive"}}, None),
        ({"thinking": {"type": "disabled"}}, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}, "output_config": {"effort": "medium"}}, "medium"),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}, "high"),
        ({"output_config": {"effort": "xhigh"}}, "high"),
    ],
)
def test_thinking_becomes_a_reasoning_effort(fields: Item, effort: str | None) -> None:
    assert parse(**fields).get("reasoning") == (effort and {"effort": effort})


@pytest.mark.parametrize("place", ["output_config", "output_format"])
def test_an_output_format_is_converted(place: str) -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    request = parse(**{place: form if place == "output_format" else {"format": form}})
    assert request["text"]["format"] == form | {"name": "answer", "strict": True}


def test_sampling_parameters_and_engine_options_are_passed_on() -> None:
    request = parse(temperature=0.5, top_p=0.9, top_k=20, min_p=0.1, stop_sequences=["\n"], stream=True, flux={})
    expected = {"flux": {}, "temperature": 0.5, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "stop": ["\n"]}
    assert request == parse() | expected


def test_metadata_other_than_the_user_is_passed_on() -> None:
    request = parse(metadata={"user_id": "u", "extra_body": '{"seed": 1}'})
    assert (request["user"], request["metadata"]) == ("u", {"extra_body": '{"seed": 1}'})


def test_a_key_that_only_responses_has_is_ignored_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "gymsdk"):
        assert parse(instructions="x") == parse(instructions="x") == parse()
    assert ["instructions" in record.getMessage() for record in caplog.records] == [True]


USER: Item = {"role": "user"}
ASSISTANT: Item = {"role": "assistant"}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": ""}}


def say(message: Item, **content_block: Any) -> Item:
    """Return a body with one message that has one block."""
    return {"messages": [message | {"content": [content_block]}]}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"messages": None}, "messages", "a list"),
        ({"messages": []}, "messages", "at least one"),
        ({"messages": ["hi"]}, "messages.0", "an object"),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages.0.role", "'tool'"),
        ({"messages": [{"role": [], "content": ""}]}, "messages.0.role", "'user'"),
        ({"messages": [USER]}, "messages.0.content", "a list"),
        ({"messages": [USER | {"content": [{"type": "text"}]}]}, "messages.0.content.0.text", "a string"),
        ({"messages": [USER | {"content": [PDF]}]}, "messages.0.content.0.source", "application/pdf"),
        ({"messages": [USER | {"content": [{"type": "search_result"}]}]}, "messages.0.content.0", "search_result"),
        ({"messages": [USER | {"content": [{"type": "tool_use"}]}]}, "messages.0.content.0", "tool_use"),
        (say(USER, type="image", source={"type": "file"}), "messages.0.content.0.source", "'file'"),
        (say(ASSISTANT, type="server_tool_use"), "messages.0.content.0", "server_tool_use"),
        (say(USER, type="tool_result", content=""), "messages.0.content.0.tool_use_id", "a string"),
        (say(ASSISTANT, type="tool_use", id="c", name="f", input=1), "messages.0.content.0.input", "an object"),
        ({"system": [IMAGE]}, "system.text", "a string"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0", "web_search_20250305"),
        ({"tools": [{"name": "add"}]}, "tools.0.input_schema", "an object"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type", "'any'"),
        ({"mcp_servers": [{"url": "u"}]}, "mcp_servers", "mcp_servers"),
        ({"max_tokens": 0}, "max_tokens", "positive integer"),
        ({"max_tokens": "9"}, "max_tokens", "positive integer"),
        ({"stop_sequences": [1]}, "stop_sequences", "strings"),
        ({"output_config": {"effort": "heroic"}}, "output_config.effort", "'max'"),
        ({"output_config": {"format": {"type": "regex"}}}, "output_config.format", "json_schema"),
        ({"thinking": {"type": "enabled", "budget_tokens": "1"}}, "thinking.budget_tokens", "an integer"),
        ({"metadata": []}, "metadata", "an object"),
    ],
)
def test_an_unsupported_request_is_rejected_with_a_sentence(fields: Item, param: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse(**fields)
    assert refused.value.param == param
    assert message in str(refused.value)
