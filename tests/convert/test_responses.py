"""Requests to servers of the Responses API, and their answers."""

from __future__ import annotations

import pytest

from gymsdk import responses as wire
from gymsdk.convert import responses
from gymsdk.errors import Failed
from gymsdk.types import extract_text

TOOL = {"type": "function", "name": "add", "description": "Adds.", "parameters": {"type": "object"}, "strict": True}


def test_what_metadata_carries_is_written_out() -> None:
    metadata = {"extra_body": '{"top_k": 20}', "tag": "t"}
    body = responses.build_body({"input": "x", "metadata": metadata, "stream": True, "top_logprobs": None})
    assert body == {"input": "x", "top_k": 20, "metadata": {"tag": "t"}}


def test_an_answer_is_made_whole() -> None:
    answer = {"id": "r", "output": [wire.build_message("x")], "usage": {"input_tokens": 1, "output_tokens": 2}}
    response = responses.parse_answer(answer, {"model": "m", "tools": [TOOL]})
    assert response.keys() >= wire.build_response([], model="m").keys()
    assert (response["id"], response["model"], response["tools"]) == ("r", "m", [TOOL])
    assert response["usage"]["input_tokens_details"] == {"cached_tokens": None}


@pytest.mark.parametrize("answer", [None, {}, {"output": "x"}, {"output": ["x"]}])
def test_an_answer_that_is_not_a_response_is_a_bad_answer(answer: object) -> None:
    with pytest.raises(Failed, match="not a Response") as caught:
        responses.parse_answer(answer, {})
    assert caught.value.kind == "model_bad_answer"


def test_a_failed_response_is_a_failure() -> None:
    with pytest.raises(Failed, match="server_error") as caught:
        responses.parse_answer({"status": "failed", "error": {"code": "server_error"}, "output": []}, {})
    assert (caught.value.kind, caught.value.retryable) == ("model_error", True)


def test_a_response_with_an_error_is_a_failure_with_any_status() -> None:
    with pytest.raises(Failed, match="overloaded"):
        responses.parse_answer({"status": "completed", "error": {"message": "overloaded"}, "output": []}, {})


@pytest.mark.parametrize("usage", [None, {}, "much", 7, [1]])
def test_usage_that_is_not_an_object_is_none(usage: object) -> None:
    assert responses.parse_answer({"output": [], "usage": usage}, {})["usage"] is None


@pytest.mark.parametrize("odd", [None, "7", {}, [7]])
def test_odd_members_of_usage_count_nothing(odd: object) -> None:
    usage = dict.fromkeys(wire.build_usage(), odd)
    assert responses.parse_answer({"output": [], "usage": usage}, {})["usage"] == wire.build_usage(0, 0)


def test_usage_keeps_what_else_was_reported() -> None:
    usage = {"input_tokens": 1, "input_tokens_details": {"cached_tokens": 1, "audio_tokens": 2}, "cost": 0.5}
    told = responses.parse_answer({"output": [], "usage": usage}, {})["usage"]
    assert (told["cost"], told["input_tokens_details"]) == (0.5, {"cached_tokens": 1, "audio_tokens": 2})


def kinds(*output: object) -> list[str]:
    return [item["type"] for item in responses.parse_answer({"output": list(output)}, {})["output"]]


@pytest.mark.parametrize("content", ["<think>hm</think>42", [{"type": "output_text", "text": "hm</think>42"}]])
def test_thoughts_that_a_server_left_in_the_text_are_items(content: object) -> None:
    said = responses.parse_answer({"output": [wire.build_message("") | {"content": content}]}, {})["output"]
    assert [item["type"] for item in said] == ["reasoning", "message"]
    assert (extract_text(said[0]["summary"]), extract_text(said[1]["content"])) == ("hm", "42")


def test_nothing_but_thoughts_is_no_message_and_carries_the_tokens() -> None:
    tokens = {"prompt_token_ids": [1], "generation_token_ids": [2], "generation_log_probs": [-0.5]}
    [said] = responses.parse_answer({"output": [wire.build_message("<think>hm") | tokens]}, {}, strict=True)["output"]
    assert (said["type"], said["generation_token_ids"]) == ("reasoning", [2])


def test_an_empty_thought_leaves_what_stands_after_it() -> None:
    [said] = responses.parse_answer({"output": [wire.build_message("<think></think>\n\n42")]}, {})["output"]
    assert extract_text(said["content"]) == "42"


def test_a_response_without_reasoning_is_unchanged() -> None:
    output = [wire.build_message("a <b>"), wire.build_message("") | {"content": None}, {"type": "web_search_call"}]
    told = responses.parse_answer({"output": output}, {})["output"]
    assert all(ours is theirs for ours, theirs in zip(told, output, strict=True))


def test_a_refusal_after_thoughts_stays() -> None:
    refusal = {"type": "refusal", "refusal": "No."}
    said = wire.build_message("") | {"content": [{"type": "output_text", "text": "<think>hm</think>"}, refusal]}
    assert kinds(said) == ["reasoning", "message"]
