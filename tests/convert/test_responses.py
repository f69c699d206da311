"""What is sent to a server that speaks Responses, and what it must answer."""

from __future__ import annotations

import pytest

from gymsdk import wire
from gymsdk.convert import responses
from gymsdk.errors import Failed

TOOL = {"type": "function", "name": "add", "description": "Adds.", "parameters": {"type": "object"}, "strict": True}


def test_what_metadata_carries_is_written_out() -> None:
    metadata = {"extra_body": '{"top_k": 20}', "tag": "t"}
    body = responses.body({"input": "x", "metadata": metadata, "stream": True, "top_logprobs": None})
    assert body == {"input": "x", "top_k": 20, "metadata": {"tag": "t"}}


def test_an_answer_is_made_whole() -> None:
    answer = {"id": "r", "output": [wire.message("x")], "usage": {"input_tokens": 1, "output_tokens": 2}}
    response = responses.response(answer, {"model": "m", "tools": [TOOL]})
    assert response.keys() >= wire.response([], model="m").keys()
    assert (response["id"], response["model"], response["tools"]) == ("r", "m", [TOOL])
    assert response["usage"]["input_tokens_details"] == {"cached_tokens": None}


@pytest.mark.parametrize("answer", [None, {}, {"output": "x"}, {"output": ["x"]}])
def test_what_is_no_response_is_a_bad_answer(answer: object) -> None:
    with pytest.raises(Failed, match="no Response") as caught:
        responses.response(answer, {})
    assert caught.value.kind == "model_bad_answer"


def test_a_failed_response_is_a_failure() -> None:
    with pytest.raises(Failed, match="server_error") as caught:
        responses.response({"status": "failed", "error": {"code": "server_error"}, "output": []}, {})
    assert (caught.value.kind, caught.value.retryable) == ("model_error", True)
