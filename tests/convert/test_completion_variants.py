"""Chat completions of different servers become Responses."""

from __future__ import annotations

from typing import Any

import pytest

from gymsdk import responses
from gymsdk.convert import chat
from gymsdk.errors import Failed
from gymsdk.types import Item

THINKING = {"type": "thinking", "thinking": [{"type": "text", "text": "a"}]}


def read(**message: Any) -> tuple[list[str], str | None]:
    """The thoughts and the text of the Response to a completion with this *message*."""
    choice = {"index": 0, "message": {"role": "assistant"} | message, "finish_reason": "stop"}
    output = chat.parse_completion({"model": "m", "choices": [choice]}, {})["output"]
    thoughts = [part["text"] for item in output if item["type"] == "reasoning" for part in item["summary"]]
    return thoughts, next((item["content"][0]["text"] for item in output if item["type"] == "message"), None)


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
def test_thoughts_are_an_item_whatever_flag_the_server_runs_with(
    message: Item, expected: tuple[list[str], str]
) -> None:
    assert read(**message) == expected


def test_a_call_after_a_thought_in_a_field_is_a_call() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    completion = {"choices": [{"message": {"content": None, "reasoning": "a", "tool_calls": [call]}}]}
    assert [item["type"] for item in chat.parse_completion(completion, {})["output"]] == ["reasoning", "function_call"]


def test_the_token_fields_of_a_turn_go_back_as_they_came_empty_ones_too() -> None:
    tokens = {"prompt_token_ids": [1], "generation_token_ids": [], "generation_log_probs": [], "routed_experts": [[7]]}
    [message] = chat.build_messages({"input": [responses.build_reasoning("a"), responses.build_message("") | tokens]})
    assert {key: message[key] for key in tokens} == tokens


def test_some_token_fields_alone_fail_only_where_they_are_wanted() -> None:
    completion = {"choices": [{"message": {"content": "x", "prompt_token_ids": [1]}}]}
    assert chat.parse_completion(completion, {})["output"][0].keys() == responses.build_message("").keys()


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_answer_that_the_engine_gave_up_is_no_reply(reason: str) -> None:
    choice = {"message": {"content": "The answer is"}, "finish_reason": reason}
    with pytest.raises(Failed, match=f"gave up the answer .*{reason}") as caught:
        chat.parse_completion({"choices": [choice]}, {})
    assert (caught.value.kind, caught.value.retryable) == ("model_error", True)


def test_sound_and_film_reach_the_model() -> None:
    given = [
        {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}},
        {"type": "input_audio", "audio_url": "http://x/a.wav"},
        {"type": "input_video", "video_url": "http://x/a.mp4"},
    ]
    [message] = chat.build_messages({"input": [{"role": "user", "content": given}]})
    assert message["content"] == [
        {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": "http://x/a.wav"}},
        {"type": "video_url", "video_url": {"url": "http://x/a.mp4"}},
    ]


def test_log_probabilities_of_several_tokens_are_asked_for_whole() -> None:
    body = chat.build_body({"input": "x", "top_logprobs": 3})
    assert (body["logprobs"], body["top_logprobs"]) == (True, 3)
