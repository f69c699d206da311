"""Convert Responses to Anthropic messages, and back as the history of the next request."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymsdk import responses
from gymsdk.convert import anthropic
from gymsdk.convert.api import ApiError
from gymsdk.jsonl import dump_json, parse_json
from gymsdk.responses import build_usage
from gymsdk.types import Item

TOKENS = {"prompt_token_ids": [1, 2], "generation_token_ids": [3], "generation_log_probs": [-0.5]}
REFUSAL = responses.build_message("") | {"content": [{"type": "refusal", "refusal": "No."}]}
CALL = responses.build_function_call("add", '{"a": 1}', "c1")


def build_message(*output: Item, **fields: Any) -> Item:
    return anthropic.build_answer(responses.build_response(list(output), model="m") | fields, {"model": "asked"})


def send_back(message: Item) -> list[Item]:
    """Return the items of a message that a client sends back as the history of its next request."""
    received = parse_json(dump_json(message))
    assert isinstance(received, dict)
    message = {"role": "assistant", "content": received["content"]}
    found: list[Item] = anthropic.parse_request({"messages": [message]})["input"]
    return found


@pytest.mark.parametrize("thinking", [None, {"type": "enabled", "budget_tokens": 2048}, {"type": "adaptive"}])
def test_disabled_thinking_removes_reasoning_but_not_its_tokens(thinking: Item | None) -> None:
    output = [responses.build_reasoning("hmm"), CALL, responses.build_reasoning("well") | TOKENS]
    response = responses.build_response(output, model="m")
    message = anthropic.build_answer(response, {"thinking": {"type": "disabled"}})
    [call] = message["content"]
    assert (call["type"], call["generation_token_ids"]) == ("tool_use", [3])
    assert "generation_token_ids" not in response["output"][1]
    shown = anthropic.build_answer(response, {"thinking": thinking})["content"]
    assert [block["type"] for block in shown] == ["thinking", "tool_use", "thinking"]


def test_fields_for_anthropic_servers_only_are_ignored_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "context_management": {"edits": []}, "betas": ["x"]}
    assert anthropic.parse_request(body).keys() == {"input"}
    assert not caplog.messages


def without_new_ids(items: list[Item]) -> list[Item]:
    """Remove the ids of messages and calls, which are new after a round trip. Reasoning keeps its id."""
    return [item if item["type"] == "reasoning" else {k: v for k, v in item.items() if k != "id"} for item in items]


def test_a_response_becomes_a_message() -> None:
    message = build_message(
        responses.build_reasoning("hmm", id="rs_1"),
        responses.build_message("I add."),
        CALL,
        usage=build_usage(7, 4),
    )
    thinking, *rest = message["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "hmm")
    assert thinking["signature"]
    assert rest == [
        {"type": "text", "text": "I add."},
        {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
    ]
    assert message.pop("id").startswith("msg_")
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": message["content"],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "stop_details": None,
        "usage": {"input_tokens": 7, "output_tokens": 4} | cached,
    }


@pytest.mark.parametrize(
    ("output", "fields", "reason"),
    [
        ([responses.build_message("hi")], {}, "end_turn"),
        ([], {}, "end_turn"),
        ([CALL], {}, "tool_use"),
        ([CALL], {"incomplete_details": {"reason": "max_output_tokens"}}, "max_tokens"),
        ([], {"incomplete_details": {"reason": "max_output_tokens", "message": "too long"}}, "max_tokens"),
        ([responses.build_message("")], {"incomplete_details": {"reason": "content_filter"}}, "refusal"),
        ([REFUSAL], {}, "refusal"),
        ([responses.build_message("half")], {"status": "incomplete"}, "max_tokens"),
        ([responses.build_message("hi")], {"stop_sequence": "\n"}, "stop_sequence"),
    ],
)
def test_the_stop_reason_is_converted(output: list[Item], fields: Item, reason: str) -> None:
    message = build_message(*output, **fields)
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, fields.get("stop_sequence"))


def test_cached_input_tokens_are_counted_separately() -> None:
    usage = build_message(usage=build_usage(9, 4, cached_tokens=6, reasoning_tokens=3))["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (3, 6)
    assert usage["output_tokens_details"] == {"thinking_tokens": 3}


def test_token_fields_are_on_the_last_block() -> None:
    *_, first, last = build_message(responses.build_message("I add."), responses.build_reasoning("a", "b") | TOKENS)[
        "content"
    ]
    assert not TOKENS.keys() & first.keys()
    assert TOKENS.items() <= last.items()


@pytest.mark.parametrize(
    ("item", "content"),
    [
        (
            responses.build_function_call("add", '{"a": ', "c"),
            [{"type": "tool_use", "id": "c", "name": "add", "input": {"_arguments": '{"a": '}}],
        ),
        (REFUSAL, [{"type": "text", "text": "No."}]),
        ({"type": "web_search_call", "id": "ws_1", "status": "completed"}, []),
    ],
)
def test_refusals_are_text_broken_arguments_are_verbatim_and_other_items_are_left_out(
    item: Item, content: list[Item]
) -> None:
    answer = build_message(item, usage=None)
    assert (answer["content"], answer["usage"]["input_tokens"]) == (content, 0)


def test_an_input_that_the_client_changes_replaces_the_original_arguments() -> None:
    message = build_message(responses.build_function_call("add", '{"a":1}', "c"))
    assert send_back(message)[0]["arguments"] == '{"a":1}'
    message["content"][0]["input"]["a"] = 2
    assert send_back(message)[0]["arguments"] == '{"a": 2}'


def test_a_client_that_rebuilds_its_blocks_loses_only_spaces_and_ids() -> None:
    message = build_message(
        responses.build_reasoning("hmm"), responses.build_function_call("add", '{"a":1}', "c") | TOKENS
    )
    kept = {"type", "thinking", "signature", "id", "name", "input"}
    message["content"] = [{key: block[key] for key in block if key in kept} for block in message["content"]]
    thought, call = send_back(message)
    assert thought["summary"] == [{"type": "summary_text", "text": "hmm"}]
    assert (call["call_id"], call["arguments"]) == ("c", '{"a": 1}')


UNUSUAL_ARGUMENTS = [
    *["", "{}", "[]", "null", "NaN", '{"a": NaN}', '{"a": 1e999}', '{"a":1.50}', '{"a":1,"a":2}', "[" * 5000],
    *['{"_arguments": "x"}', '{"_arguments": 1}', '{"a": 123456789012345678901234567890}', '{"a": "\\ud800"}'],
]
OBJECTS = st.dictionaries(st.text(), st.integers() | st.text() | st.none() | st.lists(st.booleans()))
ARGUMENTS = (
    st.text() | st.sampled_from(UNUSUAL_ARGUMENTS) | OBJECTS.map(lambda found: json.dumps(found, separators=(",", ":")))
)
IDS = st.text("abcdef0123456789", min_size=8).map("rs_{}".format)


def text_parts(texts: list[str], kind: str) -> list[Item]:
    return [{"type": kind, "text": text} for text in texts]


def reasoning_items() -> st.SearchStrategy[Item]:
    texts = st.lists(st.text(), max_size=3)
    summed = st.builds(lambda texts, name: responses.build_reasoning(*texts, id=name), texts, IDS)
    plain = st.builds(
        lambda texts, name: {
            "id": name,
            "type": "reasoning",
            "summary": [],
            "content": text_parts(texts, "reasoning_text"),
            "encrypted_content": "gAAA",
        },
        texts.filter(bool),
        IDS,
    )
    return summed | plain


OUTPUTS = st.lists(
    st.one_of(
        st.text().map(responses.build_message),
        reasoning_items(),
        st.builds(responses.build_function_call, st.text(), ARGUMENTS, st.text(min_size=1)),
    ),
    max_size=5,
    unique_by=lambda item: item["id"],
)


@pytest.mark.slow
@given(OUTPUTS, st.booleans())
def test_a_conversation_survives_the_round_trip(output: list[Item], tokens: bool) -> None:
    if output and tokens:
        output[-1] |= TOKENS
    assert without_new_ids(send_back(build_message(*output))) == without_new_ids(output)


@pytest.mark.parametrize(
    ("kind", "statuses"),
    [
        ("invalid_request_error", [400, 422]),
        ("authentication_error", [401]),
        ("permission_error", [403]),
        ("not_found_error", [404]),
        ("request_too_large", [413]),
        ("rate_limit_error", [429]),
        ("api_error", [500, 502]),
        ("overloaded_error", [503, 529]),
        ("timeout_error", [504]),
    ],
)
def test_errors_have_the_format_of_anthropic(kind: str, statuses: list[int]) -> None:
    for status in statuses:
        error = anthropic.MESSAGES_API.build_error(ApiError(status, "The request is invalid.", param="messages"))
        assert error == {"type": "error", "error": {"type": kind, "message": "The request is invalid."}}
