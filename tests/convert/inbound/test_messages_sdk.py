"""The Anthropic SDK reads the answers of the Messages API, with and without streaming."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymsdk import responses
from gymsdk.convert.api import ApiError
from gymsdk.responses import build_usage
from gymsdk.types import Item

from .conftest import BuildClient, FixedServer

TOKENS = {"prompt_token_ids": [1, 2], "generation_token_ids": [3], "generation_log_probs": [-0.5]}
USER = {"role": "user", "content": "hi"}
REQUEST: Any = {"model": "m", "max_tokens": 9, "messages": [USER]}
OUTPUT = [
    responses.build_reasoning("hmm", "so", id="rs_1"),
    responses.build_reasoning(id="rs_2"),
    responses.build_message("I add.\u2028\x85"),
    responses.build_function_call("add", '{"a":1}', "c1"),
    responses.build_function_call("add", "{", "c2") | TOKENS,
]


def respond(output: list[Item]) -> Item:
    return responses.build_response(output, model="m", usage=build_usage(9, 4, cached_tokens=6))


def stream_message(client: Any) -> Item:
    with client.messages.stream(**REQUEST) as stream:
        message: Item = without_parsing(stream.get_final_message().to_dict())
        return message


def without_parsing(message: Item) -> Item:
    """Return *message* without the parsed fields and the nulls that some SDK versions add."""
    blocks = [{key: value for key, value in block.items() if value is not None} for block in message["content"]]
    return message | {"content": [{key: block[key] for key in block if key != "parsed_output"} for block in blocks]}


def test_the_sdk_reads_every_block_and_sends_back_the_same_conversation(
    anthropic_client: BuildClient, server: FixedServer
) -> None:
    client = anthropic_client(respond(OUTPUT))
    message = client.messages.create(**REQUEST)
    kinds = [block.type for block in message.content]
    assert kinds == ["thinking", "thinking", "redacted_thinking", "text", "tool_use", "tool_use"]
    assert (message.stop_reason, message.usage.cache_read_input_tokens) == ("tool_use", 6)
    with client.messages.stream(**REQUEST) as stream:
        turn = stream.get_final_message().content
    results = [{"type": "tool_result", "tool_use_id": call, "content": "2"} for call in ("c1", "c2")]
    history = [USER, {"role": "assistant", "content": turn}, {"role": "user", "content": results}]
    client.messages.create(**(REQUEST | {"messages": history}))
    sent, expected = (
        [{key: item[key] for key in item if key not in {"id", "status"}} for item in items]
        for items in (server.request["input"][1:-2], OUTPUT)
    )
    assert sent == expected


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(
    output=st.lists(
        st.one_of(
            st.text().map(responses.build_message),
            st.lists(st.text(), max_size=2).map(lambda texts: responses.build_reasoning(*texts)),
            st.builds(
                responses.build_function_call,
                st.text(min_size=1),
                st.text() | st.dictionaries(st.text(), st.integers(0, 9) | st.text()).map(json.dumps),
                st.text(min_size=1),
            ),
        ),
        max_size=4,
    )
)
def test_any_answer_is_the_same_with_streaming(anthropic_client: BuildClient, output: list[Item]) -> None:
    client = anthropic_client(respond(output))
    plain = without_parsing(client.messages.create(**REQUEST).to_dict())
    assert stream_message(client) | {"id": plain["id"]} == plain


@pytest.mark.parametrize("arguments", ["", "{", "[1]", '{"a": NaN}', '{"a": "\\ud800"}', '{"a": 1e999}'])
def test_unusual_arguments_do_not_break_a_stream(anthropic_client: BuildClient, arguments: str) -> None:
    output = [responses.build_function_call("add", arguments, "c")]
    [block] = stream_message(anthropic_client(respond(output)))["content"]
    assert block["input"] == ({"_arguments": arguments} if arguments else {})


def test_a_stream_sends_text_incrementally(anthropic_client: BuildClient) -> None:
    output = [responses.build_message("40"), responses.build_message(" + 2")]
    with anthropic_client(respond(output)).messages.stream(**REQUEST) as stream:
        assert list(stream.text_stream) == ["40", " + 2"]


def test_the_sdk_raises_its_own_errors_and_counts_tokens(anthropic_client: BuildClient) -> None:
    from anthropic import APIStatusError, BadRequestError, RateLimitError

    client = anthropic_client(ApiError(429, "Too soon.", code="model_rate_limited"))
    with pytest.raises(RateLimitError, match=r"Too soon\.") as raised:
        client.messages.create(**REQUEST)
    assert raised.value.body["error"]["details"] == {"error_code": "model_rate_limited"}
    with pytest.raises(APIStatusError, match=r"Too soon\."):
        stream_message(client)
    tool = {"type": "web_search_20250305", "name": "web_search"}
    with pytest.raises(BadRequestError, match="web_search_20250305"):
        client.messages.create(**REQUEST, tools=[tool])
    assert client.messages.count_tokens(model="m", messages=[USER]).input_tokens == 7
