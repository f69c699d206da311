"""Convert chat completions of different servers to Responses."""

from __future__ import annotations

from typing import Any

import pytest

from gymsdk import responses
from gymsdk.convert import chat
from gymsdk.errors import Failed
from gymsdk.types import Item

THINKING = {"type": "thinking", "thinking": [{"type": "text", "text": "a"}]}


def parse_message(**message: Any) -> tuple[list[str], str | None]:
    """Parse a completion with this *message*; return the reasoning texts and the text of the Response."""
    choice = {"index": 0, "message": {"role": "assistant"} | message, "finish_reason": "stop"}
    output = chat.parse_completion({"model": "m", "choices": [choice]}, {})["output"]
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
    ],
)
def test_reasoning_becomes_an_item_in_every_format_of_servers(message: Item, expected: tuple[list[str], str]) -> None:
    assert parse_message(**message) == expected


def test_a_tool_call_after_a_reasoning_field_is_parsed() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    completion = {"choices": [{"message": {"content": None, "reasoning": "a", "tool_calls": [call]}}]}
    assert [item["type"] for item in chat.parse_completion(completion, {})["output"]] == ["reasoning", "function_call"]


def test_token_fields_of_a_turn_are_sent_back_unchanged_even_if_empty() -> None:
    tokens = {"prompt_token_ids": [1], "generation_token_ids": [], "generation_log_probs": [], "routed_experts": [[7]]}
    [message] = chat.build_messages({"input": [responses.build_reasoning("a"), responses.build_message("") | tokens]})
    assert {key: message[key] for key in tokens} == tokens


def test_incomplete_token_fields_are_ignored_by_default() -> None:
    completion = {"choices": [{"message": {"content": "x", "prompt_token_ids": [1]}}]}
    assert chat.parse_completion(completion, {})["output"][0].keys() == responses.build_message("").keys()


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_a_completion_that_the_engine_aborted_is_a_failure(reason: str) -> None:
    choice = {"message": {"content": "The answer is"}, "finish_reason": reason}
    with pytest.raises(Failed, match=f"gave up the answer .*{reason}") as caught:
        chat.parse_completion({"choices": [choice]}, {})
    assert (caught.value.kind, caught.value.retryable) == ("model_error", True)


def test_audio_and_video_parts_reach_the_model() -> None:
    parts = [
        {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}},
        {"type": "input_audio", "audio_url": "http://x/a.wav"},
        {"type": "input_video", "video_url": "http://x/a.mp4"},
    ]
    [message] = chat.build_messages({"input": [{"role": "user", "content": parts}]})
    assert message["content"] == [
        {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": "http://x/a.wav"}},
        {"type": "video_url", "video_url": {"url": "http://x/a.mp4"}},
    ]


def test_top_logprobs_requests_log_probabilities_too() -> None:
    body = chat.build_body({"input": "x", "top_logprobs": 3})
    assert (body["logprobs"], body["top_logprobs"]) == (True, 3)
