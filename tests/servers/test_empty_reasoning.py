"""Empty reasoning survives: some engines refuse a conversation without the empty reasoning that they returned."""

from __future__ import annotations

import json

import pytest

from gymsdk.convert import chat, chat_inbound
from gymsdk.types import Item

FIELDS = ("reasoning_content", "reasoning")


@pytest.mark.parametrize("field", FIELDS)
def test_empty_reasoning_is_an_item_and_a_message_beside_it_stays(field):
    completion = {"choices": [{"message": {"role": "assistant", "content": "", field: ""}, "finish_reason": "stop"}]}
    response = chat.parse_completion(completion, {})
    assert [item["type"] for item in response["output"]] == ["reasoning", "message"]
    [turn] = chat.build_messages({"input": response["output"]})
    assert (turn["reasoning_content"], turn["reasoning"]) == ("", "")
    message = chat_inbound.build_completion(response)["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"], message["reasoning"]) == ("", "", "")
    stream = b"".join(chat_inbound.stream_chunks(chat_inbound.build_completion(response), {}))
    deltas = [
        json.loads(line[6:])["choices"][0]["delta"] for line in stream.splitlines() if line.startswith(b"data: {")
    ]
    assert {"reasoning_content": "", "reasoning": ""} in deltas


@pytest.mark.parametrize("value", [None, ...])
def test_a_message_without_reasoning_has_none(value):
    message: Item = {"role": "assistant", "content": "hi"} | ({} if value is ... else dict.fromkeys(FIELDS))
    response = chat.parse_completion({"choices": [{"message": message, "finish_reason": "stop"}]}, {})
    assert [item["type"] for item in response["output"]] == ["message"]
    assert not {*FIELDS} & chat.build_messages({"input": response["output"]})[0].keys()
    assert not {*FIELDS} & chat_inbound.build_completion(response)["choices"][0]["message"].keys()
