"""Empty reasoning survives: some engines refuse a conversation without the empty reasoning that they returned."""

from __future__ import annotations

import json

import httpx
import pytest
from aiohttp import web

from gymsdk import model
from gymsdk.convert import chat, chat_inbound
from gymsdk.servers.model import create_app
from gymsdk.types import Item

from .app_helpers import app_client, serve_handler

CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
TOOL: Item = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
FIELDS = ("reasoning_content", "reasoning")


def answer_as_strict_engine(body: Item, field: str) -> web.Response:
    turns = [message for message in body["messages"] if message["role"] == "assistant"]
    if any(turn.get(field) != "" for turn in turns):
        return web.json_response({"error": {"message": f"{field} of earlier turns is missing"}}, status=400)
    content = {"content": "Done."} if turns else {"content": None, "tool_calls": [CALL]}
    message = {"role": "assistant", field: ""} | content
    return web.json_response({"choices": [{"message": message, "finish_reason": "stop"}], "usage": {}})


async def continue_chat(http: httpx.AsyncClient) -> str:
    tools = [{"type": "function", "function": {key: value for key, value in TOOL.items() if key != "type"}}]
    messages: list[Item] = [{"role": "user", "content": "Look."}]
    first = await http.post("/v1/chat/completions", json={"messages": messages, "tools": tools})
    messages += [first.json()["choices"][0]["message"], {"role": "tool", "tool_call_id": "c", "content": "nothing"}]
    return (await http.post("/v1/chat/completions", json={"messages": messages, "tools": tools})).text


async def continue_responses(http: httpx.AsyncClient) -> str:
    items: list[Item] = [{"role": "user", "content": "Look."}]
    first = await http.post("/v1/responses", json={"input": items, "tools": [TOOL]})
    items += [*first.json()["output"], {"type": "function_call_output", "call_id": "c", "output": "nothing"}]
    return (await http.post("/v1/responses", json={"input": items, "tools": [TOOL]})).text


async def continue_messages(http: httpx.AsyncClient) -> str:
    tools = [{"name": "look", "input_schema": TOOL["parameters"]}]
    messages: list[Item] = [{"role": "user", "content": "Look."}]
    body: Item = {"max_tokens": 9, "tools": tools}
    first = await http.post("/v1/messages", json=body | {"messages": messages})
    result = {"type": "tool_result", "tool_use_id": "c", "content": "nothing"}
    messages += [{"role": "assistant", "content": first.json()["content"]}, {"role": "user", "content": [result]}]
    return (await http.post("/v1/messages", json=body | {"messages": messages})).text


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("converse", [continue_chat, continue_responses, continue_messages])
async def test_empty_reasoning_goes_back_to_the_engine_through_each_api(converse, field):
    async def answer(request: web.Request) -> web.Response:
        return answer_as_strict_engine(await request.json(), field)

    async with serve_handler(answer) as url:
        policy = model("vllm/m", base_url=f"{url}/v1", retries=0)
        async with app_client(create_app(policy)) as http:
            assert "Done." in await converse(http)


@pytest.mark.parametrize("field", FIELDS)
def test_empty_reasoning_is_an_item_and_a_message_beside_it_stays(field):
    completion = {"choices": [{"message": {"role": "assistant", "content": "", field: ""}, "finish_reason": "stop"}]}
    response = chat.parse_completion(completion, {})
    assert [item["type"] for item in response["output"]] == ["reasoning", "message"]
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
