"""Responses become Anthropic messages, and return as the history of the next request."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymsdk import responses
from gymsdk.convert import anthropic
from gymsdk.convert.api import ApiError
from gymsdk.convert.apis import INBOUND_APIS
from gymsdk.jsonl import dump_json, parse_json
from gymsdk.types import Item

TOKENS = {"prompt_token_ids": [1, 2], "generation_token_ids": [3], "generation_log_probs": [-0.5]}
REFUSAL = responses.build_message("") | {"content": [{"type": "refusal", "refusal": "No."}]}
CALL = responses.build_function_call("add", '{"a": 1}', "c1")


def told(*output: Item, **more: Any) -> Item:
    return anthropic.build_answer(responses.build_response(list(output), model="m") | more, {"model": "asked"})


def again(message: Item) -> list[Item]:
    """The items of a message that a client has received and sends back as the history of its next request."""
    received = parse_json(dump_json(message))
    assert isinstance(received, dict)
    said = {"role": "assistant", "content": received["content"]}
    found: list[Item] = anthropic.parse_request({"messages": [said]})["input"]
    return found


def test_disabled_thinking_removes_reasoning_but_not_its_tokens() -> None:
    response = responses.build_response(
        [responses.build_reasoning("hmm"), CALL, responses.build_reasoning("well") | TOKENS], model="m"
    )
    message = anthropic.build_answer(response, {"thinking": {"type": "disabled"}})
    [call] = message["content"]
    assert (call["type"], call["generation_token_ids"]) == ("tool_use", [3])
    assert "generation_token_ids" not in response["output"][1]


@pytest.mark.parametrize("thinking", [None, {"type": "enabled", "budget_tokens": 2048}, {"type": "adaptive"}])
def test_reasoning_is_returned_by_default(thinking: Item | None) -> None:
    message = anthropic.build_answer(
        responses.build_response([responses.build_reasoning("hmm")], model="m"), {"thinking": thinking}
    )
    assert [block["type"] for block in message["content"]] == ["thinking"]


def test_what_only_anthropics_servers_do_is_known_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    given = {"messages": [{"role": "user", "content": "hi"}], "context_management": {"edits": []}, "betas": ["x"]}
    assert anthropic.parse_request(given).keys() == {"input"}
    assert not caplog.messages


def without_new_ids(items: list[Item]) -> list[Item]:
    """What survives of *items*: replies and calls have new ids, reasoning keeps its own."""
    return [item if item["type"] == "reasoning" else {k: v for k, v in item.items() if k != "id"} for item in items]


def test_a_message() -> None:
    message = told(
        responses.build_reasoning("hmm", id="rs_1"),
        responses.build_message("I add."),
        CALL,
        usage=responses.build_usage(7, 4),
    )
    thinking, *rest = message["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "hmm")
    assert thinking["signature"]
    assert rest == [
        {"type": "text", "text": "I add."},
        {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
    ]
    assert message.pop("id").startswith("msg_")
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": message["content"],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "stop_details": None,
        "usage": {
            "input_tokens": 7,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 4,
        },
    }


@pytest.mark.parametrize(
    ("output", "more", "reason"),
    [
        ([responses.build_message("hi")], {}, "end_turn"),
        ([], {}, "end_turn"),
        ([CALL], {}, "tool_use"),
        ([CALL], {"incomplete_details": {"reason": "max_output_tokens"}}, "max_tokens"),
        ([], {"incomplete_details": {"reason": "max_output_tokens", "message": "too long"}}, "max_tokens"),
        ([responses.build_message("")], {"incomplete_details": {"reason": "content_filter"}}, "refusal"),
        ([REFUSAL], {}, "refusal"),
        ([responses.build_message("hi")], {"stop_sequence": "\n"}, "stop_sequence"),
    ],
)
def test_why_it_stopped(output: list[Item], more: Item, reason: str) -> None:
    message = told(*output, **more)
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, more.get("stop_sequence"))


def test_input_from_a_cache_is_counted_apart() -> None:
    usage = told(usage=responses.build_usage(9, 4, cached_tokens=6, reasoning_tokens=3))["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (3, 6)
    assert usage["output_tokens_details"] == {"thinking_tokens": 3}


def test_usage_is_zero_without_counts() -> None:
    assert told(usage=None)["usage"]["input_tokens"] == 0


def test_tokens_are_on_the_last_block() -> None:
    *_, first, last = told(responses.build_message("I add."), responses.build_reasoning("a", "b") | TOKENS)["content"]
    assert not TOKENS.keys() & first.keys()
    assert TOKENS.items() <= last.items()


def test_a_call_whose_arguments_are_no_object_has_them_verbatim() -> None:
    (block,) = told(responses.build_function_call("add", '{"a": ', "c"))["content"]
    assert block["input"] == {"_arguments": '{"a": '}


def test_a_refusal_is_text() -> None:
    assert told(REFUSAL)["content"] == [{"type": "text", "text": "No."}]


def test_a_changed_input_counts_more_than_what_the_model_wrote() -> None:
    message = told(responses.build_function_call("add", '{"a":1}', "c"))
    assert again(message)[0]["arguments"] == '{"a":1}'
    message["content"][0]["input"]["a"] = 2
    assert again(message)[0]["arguments"] == '{"a": 2}'


def test_a_client_that_rebuilds_its_blocks_loses_only_spaces_and_ids() -> None:
    message = told(responses.build_reasoning("hmm"), responses.build_function_call("add", '{"a":1}', "c") | TOKENS)
    kept = {"type", "thinking", "signature", "id", "name", "input"}
    message["content"] = [{key: block[key] for key in block if key in kept} for block in message["content"]]
    thought, call = again(message)
    assert thought["summary"] == [{"type": "summary_text", "text": "hmm"}]
    assert (call["call_id"], call["arguments"]) == ("c", '{"a": 1}')


def test_what_neither_says_nor_calls_anything_is_left_out() -> None:
    assert told({"type": "web_search_call", "id": "ws_1", "status": "completed"})["content"] == []


ODD = [
    *["", "{}", "[]", "null", "NaN", '{"a": NaN}', '{"a": 1e999}', '{"a":1.50}', '{"a":1,"a":2}', "[" * 5000],
    *['{"_arguments": "x"}', '{"_arguments": 1}', '{"a": 123456789012345678901234567890}', '{"a": "\\ud800"}'],
]
OBJECTS = st.dictionaries(st.text(), st.integers() | st.text() | st.none() | st.lists(st.booleans()))
ARGUMENTS = st.text() | st.sampled_from(ODD) | OBJECTS.map(lambda each: json.dumps(each, separators=(",", ":")))
IDS = st.text("abcdef0123456789", min_size=8).map("rs_{}".format)


def written_out(texts: list[str], kind: str) -> list[Item]:
    return [{"type": kind, "text": text} for text in texts]


def thoughts() -> st.SearchStrategy[Item]:
    texts = st.lists(st.text(), max_size=3)
    summed = st.builds(lambda texts, name: responses.build_reasoning(*texts, id=name), texts, IDS)
    plain = st.builds(
        lambda texts, name: {
            "id": name,
            "type": "reasoning",
            "summary": [],
            "content": written_out(texts, "reasoning_text"),
            "encrypted_content": "gAAA",
        },
        texts.filter(bool),
        IDS,
    )
    return summed | plain


OUTPUTS = st.lists(
    st.one_of(
        st.text().map(responses.build_message),
        thoughts(),
        st.builds(responses.build_function_call, st.text(), ARGUMENTS, st.text(min_size=1)),
    ),
    max_size=5,
    unique_by=lambda item: item["id"],
)


@given(OUTPUTS, st.booleans())
def test_a_conversation_survives_the_round_trip(output: list[Item], tokens: bool) -> None:
    if output and tokens:
        output[-1] |= TOKENS
    assert without_new_ids(again(told(*output))) == without_new_ids(output)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (422, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
        (529, "overloaded_error"),
    ],
)
def test_an_error_in_the_words_of_the_api(status: int, kind: str) -> None:
    said = anthropic.MESSAGES_API.build_error(ApiError(status, "It is so.", param="messages"))
    assert said == {"type": "error", "error": {"type": kind, "message": "It is so."}}


def test_a_count_of_tokens() -> None:
    assert anthropic.format_token_count(7) == {"input_tokens": 7}


def test_messages_is_one_of_the_inbound_apis() -> None:
    assert INBOUND_APIS["messages"] is anthropic.MESSAGES_API


def test_an_incomplete_answer_without_a_reason_stops_with_max_tokens() -> None:
    response = responses.build_response([responses.build_message("half")], model="m", status="incomplete")
    assert anthropic.build_answer(response, {"model": "m", "messages": []})["stop_reason"] == "max_tokens"
