"""Requests of released SDKs, as they arrive at the model behind the model server."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from pydantic import BaseModel

from gymsdk import responses as wire
from gymsdk.types import Item, extract_text

from .proxies import ADD, CLIENTS, UPSTREAMS, Rig, rigged

pytestmark = pytest.mark.asyncio(loop_scope="module")

PIXEL = base64.b64encode(b"\x89PNG\r\n\x1a\n no picture at all").decode()
SHOWN = f"data:image/png;base64,{PIXEL}"
TURN = [
    wire.build_reasoning("hm"),
    wire.build_message("I add."),
    wire.build_function_call("add", '{"a":40,"b":2}', "call_1"),
    wire.build_function_call("add", '{"a":1,"b":1}', "call_2"),
]
"""A turn with every kind of item."""


class Sum(BaseModel):
    """The model's response."""

    total: int


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig() -> AsyncIterator[Rig]:
    """The proxies that the tests here share."""
    async with rigged() as made:
        yield made


async def shown(rig: Rig, client: str, upstream: str) -> None:
    """Show the model a picture."""
    openai, words = rig.openai[upstream], "What is it?"
    if client == "chat":
        parts: Any = [{"type": "text", "text": words}, {"type": "image_url", "image_url": {"url": SHOWN}}]
        await openai.chat.completions.create(model="any", messages=[{"role": "user", "content": parts}])
    elif client == "responses":
        parts = [{"type": "input_text", "text": words}, {"type": "input_image", "image_url": SHOWN, "detail": "auto"}]
        await openai.responses.create(model="any", input=[{"role": "user", "content": parts}])
    else:
        source = {"type": "base64", "media_type": "image/png", "data": PIXEL}
        parts = [{"type": "text", "text": words}, {"type": "image", "source": source}]
        messages: Any = [{"role": "user", "content": parts}]
        await rig.anthropic[upstream].messages.create(model="any", max_tokens=4096, messages=messages)


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("upstream", UPSTREAMS)
async def test_an_image_arrives(rig: Rig, upstream: str, client: str) -> None:
    rig.policy.says(wire.build_message("A dot."))
    await shown(rig, client, upstream)
    [item] = rig.policy.asked[0]["input"]
    text, picture = item["content"]
    assert (text["text"], picture["type"], picture["image_url"]) == ("What is it?", "input_image", SHOWN)


async def looped(rig: Rig, client: str, upstream: str) -> None:
    """Have the model call a tool twice in parallel, and send back both outputs with the turn as the SDK returns it."""
    asks = {"chat": _chat_loop, "responses": _responses_loop, "messages": _messages_loop}
    await asks[client](rig, upstream)


async def _chat_loop(rig: Rig, upstream: str) -> None:
    completions: Any = rig.openai[upstream].chat.completions
    tools = [{"type": "function", "function": {"name": "add", "parameters": ADD}}]
    messages: list[Any] = [{"role": "user", "content": "go"}]
    first = await completions.create(model="any", messages=messages, tools=tools)
    rig.policy.output = [wire.build_message("42 and 2")]
    messages.append(first.choices[0].message.model_dump(exclude_none=True))
    messages += [
        {"role": "tool", "tool_call_id": call.id, "content": _added(call.function.arguments)}
        for call in first.choices[0].message.tool_calls
    ]
    await completions.create(model="any", messages=messages, tools=tools)


async def _responses_loop(rig: Rig, upstream: str) -> None:
    responses: Any = rig.openai[upstream].responses
    tools = [{"type": "function", "name": "add", "parameters": ADD, "strict": True}]
    items: list[Any] = [{"role": "user", "content": "go"}]
    first = await responses.create(model="any", input=items, tools=tools)
    rig.policy.output = [wire.build_message("42 and 2")]
    items += [item.model_dump(exclude_none=True) for item in first.output]
    for item in first.output:
        if item.type == "function_call":
            items.append(wire.build_function_call_output(item.call_id, _added(item.arguments)))
    await responses.create(model="any", input=items, tools=tools)


async def _messages_loop(rig: Rig, upstream: str) -> None:
    messages: Any = rig.anthropic[upstream].messages
    tools = [{"name": "add", "input_schema": ADD}]
    words: dict[str, Any] = {"model": "any", "max_tokens": 4096, "tools": tools}
    said: list[Any] = [{"role": "user", "content": "go"}]
    first = await messages.create(messages=said, **words)
    rig.policy.output = [wire.build_message("42 and 2")]
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": _added(json.dumps(block.input))}
        for block in first.content
        if block.type == "tool_use"
    ]
    said += [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    await messages.create(messages=said, **words)


def _added(arguments: str) -> str:
    given = json.loads(arguments)
    return str(given["a"] + given["b"])


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("upstream", UPSTREAMS)
async def test_a_turn_is_sent_back_whole_with_the_outputs_of_its_calls(rig: Rig, upstream: str, client: str) -> None:
    rig.policy.says(*TURN)
    await looped(rig, client, upstream)
    # Hosted models take no thoughts but their own, and those are known by an id, which a chat has not.
    hosted = upstream.startswith("openai")
    thoughts = [] if hosted and "chat" in {client, upstream.partition("-")[2]} else [("reasoning", "hm")]
    assert [told(item) for item in rig.policy.asked[1]["input"]] == [
        ("user", "go"),
        *thoughts,
        ("assistant", "I add."),
        ("function_call", {"a": 40, "b": 2}),
        ("function_call", {"a": 1, "b": 1}),
        ("function_call_output", "42"),
        ("function_call_output", "2"),
    ]


def told(item: Item) -> tuple[str, Any]:
    """Return the type and the content of *item*."""
    kind = item.get("type", "message")
    if kind == "message":
        return item["role"], extract_text(item["content"])
    if kind == "function_call":
        return kind, json.loads(item["arguments"])
    return kind, extract_text(item["summary"] if kind == "reasoning" else item["output"])


async def parsed(rig: Rig, client: str, upstream: str) -> Any:
    """Return a structured response as the SDK parses it."""
    openai, anthropic = rig.openai[upstream], rig.anthropic[upstream]
    asks: list[Any] = [{"role": "user", "content": "40 + 2?"}]
    if client == "chat":
        completion = await openai.chat.completions.parse(model="any", messages=asks, response_format=Sum)
        return completion.choices[0].message.parsed
    if client == "responses":
        response = await openai.responses.parse(model="any", input="40 + 2?", text_format=Sum)
        return response.output_parsed
    message = await anthropic.messages.parse(model="any", max_tokens=4096, messages=asks, output_format=Sum)
    return message.parsed_output


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("upstream", UPSTREAMS)
async def test_a_response_has_the_requested_format(rig: Rig, upstream: str, client: str) -> None:
    rig.policy.says(wire.build_message('{"total": 42}'))
    assert await parsed(rig, client, upstream) == Sum(total=42)
    form = rig.policy.asked[0]["text"]["format"]
    assert (form["type"], form["schema"]["required"]) == ("json_schema", ["total"])


@pytest.mark.parametrize("prefix", ["/ng-rollout/r1", "/ng-rollout/r1/training-token-capture"])
@pytest.mark.parametrize("client", CLIENTS)
async def test_a_rollouts_prefix_is_stripped(rig: Rig, client: str, prefix: str) -> None:
    rig.policy.says(wire.build_message("42"))
    url, asks = rig.urls["vllm"] + prefix, [{"role": "user", "content": "hi"}]
    openai = rig.openai["vllm"].with_options(base_url=f"{url}/v1")
    creates: dict[str, Any] = {
        "chat": lambda: openai.chat.completions.create(model="any", messages=asks, stream=True),  # type: ignore[arg-type]  # as a test has it
        "responses": lambda: openai.responses.create(model="any", input="hi", stream=True),
        "messages": lambda: (
            rig.anthropic["vllm"]
            .with_options(base_url=url)
            .messages.create(model="any", max_tokens=9, messages=asks, stream=True)  # type: ignore[arg-type]  # as a test has it
        ),
    }
    assert "42" in str([event async for event in await creates[client]()])
