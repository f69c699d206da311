"""Requests to servers of the Responses API, and their answers."""

from __future__ import annotations

import pytest

from gymsdk import responses as wire
from gymsdk.convert import responses
from gymsdk.errors import Failed
from gymsdk.responses import build_usage
from gymsdk.types import extract_text

TOOL = {"type": "function", "name": "add", "description": "Adds.", "parameters": {"type": "object"}, "strict": True}


def test_extra_body_in_metadata_is_merged_into_the_body() -> None:
    metadata = {"extra_body": '{"top_k": 20}', "tag": "t"}
    body = responses.build_body({"input": "x", "metadata": metadata, "stream": True, "top_logprobs": None})
    assert body == {"input": "x", "top_k": 20, "metadata": {"tag": "t"}}


def test_missing_fields_of_an_answer_are_filled_in() -> None:
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


@pytest.mark.parametrize("status", ["failed", "cancelled", "queued", "in_progress"])
def test_a_failed_or_abandoned_response_is_a_failure(status: str) -> None:
    error = {"code": "server_error"} if status == "failed" else None
    with pytest.raises(Failed, match="server_error" if error else status) as caught:
        responses.parse_answer({"status": status, "error": error, "output": [wire.build_message("The ans")]}, {})
    assert (caught.value.kind, caught.value.retryable) == ("model_error", True)


def test_a_response_with_an_error_is_a_failure_with_any_status() -> None:
    with pytest.raises(Failed, match="overloaded"):
        responses.parse_answer({"status": "completed", "error": {"message": "overloaded"}, "output": []}, {})


@pytest.mark.parametrize("usage", [None, {}, "much", 7, [1]])
def test_usage_that_is_not_an_object_is_none(usage: object) -> None:
    assert responses.parse_answer({"output": [], "usage": usage}, {})["usage"] is None


@pytest.mark.parametrize("malformed", [None, "7", {}, [7]])
def test_malformed_usage_counts_are_zero(malformed: object) -> None:
    usage = dict.fromkeys(build_usage(), malformed)
    assert responses.parse_answer({"output": [], "usage": usage}, {})["usage"] == build_usage(0, 0)


def test_usage_keeps_additional_fields() -> None:
    usage = {"input_tokens": 1, "input_tokens_details": {"cached_tokens": 1, "audio_tokens": 2}, "cost": 0.5}
    parsed = responses.parse_answer({"output": [], "usage": usage}, {})["usage"]
    assert (parsed["cost"], parsed["input_tokens_details"]) == (0.5, {"cached_tokens": 1, "audio_tokens": 2})


def kinds(*output: object) -> list[str]:
    return [item["type"] for item in responses.parse_answer({"output": list(output)}, {})["output"]]


@pytest.mark.parametrize("content", ["<think>hm</think>42", [{"type": "output_text", "text": "hm</think>42"}]])
def test_reasoning_in_the_text_becomes_an_item(content: object) -> None:
    items = responses.parse_answer({"output": [wire.build_message("") | {"content": content}]}, {})["output"]
    assert [item["type"] for item in items] == ["reasoning", "message"]
    assert (extract_text(items[0]["summary"]), extract_text(items[1]["content"])) == ("hm", "42")


def test_an_answer_with_only_reasoning_has_no_message_and_keeps_the_tokens() -> None:
    tokens = {"prompt_token_ids": [1], "generation_token_ids": [2], "generation_log_probs": [-0.5]}
    [item] = responses.parse_answer({"output": [wire.build_message("<think>hm") | tokens]}, {}, strict=True)["output"]
    assert (item["type"], item["generation_token_ids"]) == ("reasoning", [2])


def test_empty_think_tags_leave_the_text_after_them() -> None:
    [item] = responses.parse_answer({"output": [wire.build_message("<think></think>\n\n42")]}, {})["output"]
    assert extract_text(item["content"]) == "42"


def test_a_response_without_reasoning_is_unchanged() -> None:
    output = [wire.build_message("a <b>"), wire.build_message("") | {"content": None}, {"type": "web_search_call"}]
    items = responses.parse_answer({"output": output}, {})["output"]
    assert all(parsed is original for parsed, original in zip(items, output, strict=True))


def test_a_refusal_after_reasoning_is_kept() -> None:
    refusal = {"type": "refusal", "refusal": "No."}
    message = wire.build_message("") | {"content": [{"type": "output_text", "text": "<think>hm</think>"}, refusal]}
    assert kinds(message) == ["reasoning", "message"]
