"""Responses requests become chat bodies, and chat completions become Responses."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from gymsdk import responses
from gymsdk.convert import chat
from gymsdk.errors import Failed
from gymsdk.responses import build_usage
from gymsdk.types import Item

TOOL = {"type": "function", "name": "add", "description": "Adds.", "parameters": {"type": "object"}, "strict": True}
TOKENS = {"prompt_token_ids": [1, 2], "generation_token_ids": [3], "generation_log_probs": [-0.5]}


def user(text: object) -> Item:
    return {"role": "user", "content": text}


def completed(message: Item, finish: str = "stop", **fields: Any) -> Item:
    choice = {"index": 0, "message": {"role": "assistant"} | message, "finish_reason": finish}
    return {"id": "chatcmpl-1", "object": "chat.completion", "model": "m", "choices": [choice]} | fields


def types(response: Item) -> list[str]:
    return [item["type"] for item in response["output"]]


class TestRequest:
    @pytest.mark.parametrize(
        "request_",
        [
            {"input": "hi"},
            {"input": [user([{"type": "input_text", "text": "hi"}])]},
            {"input": "hi"} | dict.fromkeys(["top_logprobs", "temperature", "tools", "text", "reasoning", "prompt"]),
            {"input": "hi", "tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "metadata": None},
        ],
    )
    def test_a_string_becomes_a_user_message_and_empty_fields_are_omitted(self, request_: Item) -> None:
        assert chat.build_body(request_) == {"messages": [user("hi")]}

    def test_instructions_and_leading_system_messages_are_merged(self) -> None:
        items = [{"role": "developer", "content": "B"}, {"role": "system", "content": "C"}, user("hi")]
        messages = chat.build_messages({"instructions": "A", "input": [*items, {"role": "developer", "content": "D"}]})
        systems = [{"role": "system", "content": "A\n\nB\n\nC"}, {"role": "system", "content": "D"}]
        assert messages == [systems[0], user("hi"), systems[1]]

    def test_the_items_of_one_policy_turn_become_one_message(self) -> None:
        calls = [responses.build_function_call("add", f'{{"a": {n}}}', f"c{n}") for n in (1, 2)]
        turn = [responses.build_reasoning("hmm"), responses.build_message("I add."), *calls]
        [message] = chat.build_messages({"input": turn})
        assert message == {
            "role": "assistant",
            "content": "I add.",
            "reasoning_content": "hmm",
            "reasoning": "hmm",
            "tool_calls": [
                {"id": f"c{n}", "type": "function", "function": {"name": "add", "arguments": f'{{"a": {n}}}'}}
                for n in (1, 2)
            ],
        }

    def test_a_tool_output_ends_the_turn(self) -> None:
        turns = [
            responses.build_function_call("add", "{}", "c1"),
            responses.build_function_call_output("c1", "3"),
            responses.build_message("3"),
        ]
        messages = chat.build_messages({"input": turns})
        assert [message["role"] for message in messages] == ["assistant", "tool", "assistant"]
        assert messages[0]["content"] is None
        assert messages[1] == {"role": "tool", "tool_call_id": "c1", "content": "3"}

    @pytest.mark.parametrize(
        ("reasoning_format", "expected"),
        [
            ("field", {"content": "4", "reasoning_content": "a\nb", "reasoning": "a\nb"}),
            ("tags", {"content": "<think>\na\nb\n</think>\n\n4"}),
            ("drop", {"content": "4"}),
        ],
    )
    def test_earlier_reasoning_is_sent_in_the_format_of_the_server(
        self, reasoning_format: responses.ReasoningFormat, expected: dict[str, str]
    ) -> None:
        [message] = chat.build_messages(
            {"input": [responses.build_reasoning("a", "b"), responses.build_message("4")]}, thoughts=reasoning_format
        )
        assert message == {"role": "assistant"} | expected

    def test_token_ids_stay_on_their_message_and_reasoning_may_be_in_content(self) -> None:
        item = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hmm"}]}
        [message] = chat.build_messages({"input": [item, responses.build_message("4") | TOKENS]})
        assert message.items() >= (TOKENS | {"reasoning_content": "hmm"}).items()

    def test_metadata_carries_fields_that_responses_lacks(self) -> None:
        extra = {"top_k": 20, "temperature": 0.1}
        metadata = {"extra_body": json.dumps(extra), "chat_template_kwargs": '{"enable_thinking": false}', "tag": "t"}
        body = chat.build_body({"input": "x", "temperature": 0.9, "metadata": metadata})
        kwargs = {"enable_thinking": False}
        assert body == {"top_k": 20, "temperature": 0.9, "chat_template_kwargs": kwargs, "messages": [user("x")]}

    @pytest.mark.parametrize("text", ["{", "[1]"])
    def test_metadata_that_is_not_an_object_is_a_bad_request(self, text: str) -> None:
        with pytest.raises(Failed, match=r"metadata\.extra_body") as caught:
            chat.build_body({"input": "x", "metadata": {"extra_body": text}})
        assert caught.value.kind == "model_bad_request"

    @pytest.mark.parametrize(
        ("request_", "message"),
        [
            ({"input": [{"type": "web_search_call", "id": "w"}]}, "web_search_call"),
            ({"input": [user([{"type": "input_file", "file_url": "f"}])]}, "input_file"),
            ({"input": "x", "tools": [{"type": "web_search"}]}, "web_search"),
            ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ],
    )
    def test_items_and_fields_that_chat_cannot_express_are_rejected(self, request_: Item, message: str) -> None:
        with pytest.raises(Failed, match=message) as caught:
            chat.build_body(request_)
        assert not caught.value.retryable

    def test_the_request_is_not_modified(self) -> None:
        request = {"instructions": "A", "input": [user("hi"), responses.build_message("yo") | TOKENS], "tools": [TOOL]}
        before = copy.deepcopy(request)
        chat.build_body(request)
        assert request == before


NO_COMPLETIONS: tuple[object, ...] = (None, [], {}, {"choices": []}, {"choices": [{}]}, {"error": {"message": "x"}})


class TestResponse:
    def test_text_and_parallel_calls_keep_their_order_and_ids(self) -> None:
        calls = [{"id": f"c{n}", "function": {"name": "add", "arguments": f'{{"a":{n}}}'}} for n in (1, 2)]
        completion = completed({"content": "I add.", "tool_calls": calls}, "tool_calls", created=1)
        response = chat.parse_completion(completion, {"tools": [TOOL], "temperature": 0.5})
        assert types(response) == ["message", "function_call", "function_call"]
        assert response["output"][0]["content"] == [{"type": "output_text", "text": "I add.", "annotations": []}]
        assert [item["call_id"] for item in response["output"][1:]] == ["c1", "c2"]
        assert response["output"][2]["arguments"] == '{"a":2}'
        assert (response["status"], response["model"], response["temperature"]) == ("completed", "m", 0.5)
        assert response["tools"] == [TOOL]

    @pytest.mark.parametrize("arguments", [None, "", {"a": 1}])
    def test_a_call_always_has_an_id_and_arguments_as_text(self, arguments: object) -> None:
        call = {"id": None, "function": {"name": "add", "arguments": arguments}}
        [item] = chat.parse_completion(completed({"content": None, "tool_calls": [call]}), {})["output"]
        assert item["call_id"]
        assert json.loads(item["arguments"]) == (arguments or {})

    @pytest.mark.parametrize(
        ("finish", "status", "reason"),
        [
            ("stop", "completed", None),
            ("tool_calls", "completed", None),
            ("length", "incomplete", "max_output_tokens"),
            ("content_filter", "incomplete", "content_filter"),
        ],
    )
    def test_the_finish_reason_determines_the_status(self, finish: str, status: str, reason: str | None) -> None:
        response = chat.parse_completion(completed({"content": "x"}, finish), {})
        assert (response["status"], (response["incomplete_details"] or {}).get("reason")) == (status, reason)

    @pytest.mark.parametrize("usage", [None, {}, "much", 7, [1]])
    def test_usage_that_is_not_an_object_is_none(self, usage: object) -> None:
        assert chat.parse_completion(completed({"content": "x"}, usage=usage), {})["usage"] is None

    @pytest.mark.parametrize("malformed", [None, "7", {}, [7]])
    def test_malformed_usage_counts_are_zero(self, malformed: object) -> None:
        names = ("prompt_tokens", "completion_tokens", "prompt_tokens_details", "completion_tokens_details")
        assert chat.parse_completion_usage(dict.fromkeys(names, malformed)) == build_usage(0, 0)
        usage = {"prompt_tokens": 10, "completion_tokens": 5, "completion_tokens_details": malformed}
        for cached, expected in ((malformed, build_usage(10, 5)), (8, build_usage(10, 5, cached_tokens=8))):
            details = {"prompt_tokens_details": {"cached_tokens": cached}}
            assert chat.parse_completion_usage(usage | details) == expected

    def test_token_ids_on_the_message_go_to_the_last_item(self) -> None:
        message = {"content": "I add.", "tool_calls": [{"id": "c", "function": {"name": "add", "arguments": "{}"}}]}
        first, last = chat.parse_completion(completed(message | TOKENS), {})["output"]
        assert {key: last[key] for key in TOKENS} == TOKENS
        assert not TOKENS.keys() & first.keys()

    def test_token_ids_of_the_choice_go_to_the_last_item(self) -> None:
        completion = completed({"content": "x"}, prompt_token_ids=[1, 2])
        completion["choices"][0] |= {"token_ids": [3], "logprobs": {"content": [{"token": "x", "logprob": -0.5}]}}
        [item] = chat.parse_completion(completion, {})["output"]
        assert {key: item[key] for key in TOKENS} == TOKENS
        completion["choices"][0]["token_ids"] = [3, 4]
        [item] = chat.parse_completion(completion, {})["output"]
        assert not TOKENS.keys() & item.keys(), "incomplete token ids are dropped"

    @pytest.mark.parametrize(
        "answer",
        [*NO_COMPLETIONS, {"choices": [{"message": None}]}, completed({"tool_calls": [{}]})],
    )
    def test_a_body_that_is_not_a_completion_is_a_bad_answer(self, answer: object) -> None:
        with pytest.raises(Failed, match="not a chat completion") as caught:
            chat.parse_completion(answer, {})
        assert (caught.value.kind, caught.value.retryable) == ("model_bad_answer", True)

    @pytest.mark.parametrize("content", [7, True, [7], {"text": "7"}])
    def test_content_of_another_type_is_a_bad_answer_without_retry(self, content: object) -> None:
        with pytest.raises(Failed, match="neither text nor a list of parts") as caught:
            chat.parse_completion(completed({"content": content}), {})
        assert (caught.value.kind, caught.value.retryable) == ("model_bad_answer", False)


def test_the_response_has_the_stop_sequence_that_ended_it() -> None:
    choice = {"message": {"role": "assistant", "content": "one"}, "finish_reason": "stop", "stop_reason": "two"}
    assert chat.parse_completion({"choices": [choice]}, {})["stop_sequence"] == "two"
    # vLLM gives the id of a stop token as a number.
    assert "stop_sequence" not in chat.parse_completion({"choices": [choice | {"stop_reason": 7}]}, {})


THINKING = {"type": "thinking", "thinking": [{"type": "text", "text": "a"}]}


def parse_message(**message: Any) -> tuple[list[str], str | None]:
    """Parse a completion with this *message*; return the reasoning texts and the text of the Response."""
    output = chat.parse_completion(completed(message), {})["output"]
    reasoning = [part["text"] for item in output if item["type"] == "reasoning" for part in item["summary"]]
    return reasoning, next((item["content"][0]["text"] for item in output if item["type"] == "message"), None)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"content": "<think>a</think>4"}, (["a"], "4")),
        ({"content": "a</think>4"}, (["a"], "4")),
        ({"content": "4", "reasoning_content": "a"}, (["a"], "4")),
        ({"content": "4", "reasoning": "a"}, (["a"], "4")),
        ({"content": "4", "reasoning": "a", "reasoning_content": "a"}, (["a"], "4")),
        ({"content": "4", "reasoning": "", "reasoning_content": "a"}, (["a"], "4")),
        ({"content": "<think>\na\n</think>4", "reasoning_content": "\na\n"}, (["\na\n"], "4")),
        ({"content": "<think>a</think>x<think>b</think>4"}, (["a", "b"], "x4")),
        ({"content": [THINKING, {"type": "text", "text": "4"}]}, (["a"], "4")),
        ({"content": [{"type": "text", "text": "<think>a</think>"}, {"type": "text", "text": "4"}]}, (["a"], "4")),
        ({"content": "4", "reasoning": [{"type": "text", "text": "a"}]}, (["a"], "4")),
        ({"content": "4", "reasoning": {"effort": "high"}}, ([], "4")),
        ({"content": None, "reasoning": "a"}, (["a"], None)),
        ({"content": "", "reasoning_content": "a"}, (["a"], None)),
        ({"content": None}, ([], "")),
    ],
)
def test_reasoning_becomes_an_item_in_every_format_of_servers(
    message: Item, expected: tuple[list[str], str | None]
) -> None:
    assert parse_message(**message) == expected


def test_a_tool_call_after_a_reasoning_field_is_parsed() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    message = {"content": None, "reasoning": "a", "tool_calls": [call]}
    assert types(chat.parse_completion(completed(message), {})) == ["reasoning", "function_call"]


def test_token_fields_of_a_turn_are_sent_back_unchanged_even_if_empty() -> None:
    tokens = {"prompt_token_ids": [1], "generation_token_ids": [], "generation_log_probs": [], "routed_experts": [[7]]}
    [message] = chat.build_messages({"input": [responses.build_reasoning("a"), responses.build_message("") | tokens]})
    assert {key: message[key] for key in tokens} == tokens


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_a_completion_that_the_engine_aborted_is_a_failure(reason: str) -> None:
    choice = {"message": {"content": "The answer is"}, "finish_reason": reason}
    with pytest.raises(Failed, match=f"gave up the answer .*{reason}") as caught:
        chat.parse_completion({"choices": [choice]}, {})
    assert (caught.value.kind, caught.value.retryable) == ("model_error", True)


def test_top_logprobs_requests_log_probabilities_too() -> None:
    body = chat.build_body({"input": "x", "top_logprobs": 3})
    assert (body["logprobs"], body["top_logprobs"]) == (True, 3)
