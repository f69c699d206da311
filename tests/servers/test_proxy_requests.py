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

from .proxies import ADD, CLIENTS, UPSTREAMS, ProxySetup, run_proxies

pytestmark = pytest.mark.asyncio(loop_scope="module")

PIXEL = base64.b64encode(b"\x89PNG\r\n\x1a\n no picture at all").decode()
IMAGE_URL = f"data:image/png;base64,{PIXEL}"
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
async def setup() -> AsyncIterator[ProxySetup]:
    """Yield the proxies that the tests of this module share."""
    async with run_proxies() as running:
        yield running


async def send_image(setup: ProxySetup, client: str, upstream: str) -> None:
    """Send a request with an image to the model."""
    openai, question = setup.openai[upstream], "What is it?"
    if client == "chat":
        parts: Any = [{"type": "text", "text": question}, {"type": "image_url", "image_url": {"url": IMAGE_URL}}]
        await openai.chat.completions.create(model="any", messages=[{"role": "user", "content": parts}])
    elif client == "responses":
        parts = [
            {"type": "input_text", "text": question},
            {"type": "input_image", "image_url": IMAGE_URL, "detail": "auto"},
        ]
        await openai.responses.create(model="any", input=[{"role": "user", "content": parts}])
    else:
        source = {"type": "base64", "media_type": "image/png", "data": PIXEL}
        parts = [{"type": "text", "text": question}, {"type": "image", "source": source}]
        messages: Any = [{"role": "user", "content": parts}]
        await setup.anthropic[upstream].messages.create(model="any", max_tokens=4096, messages=messages)


@pytest.mark.slow
@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("upstream", UPSTREAMS)
async def test_an_image_arrives(setup: ProxySetup, upstream: str, client: str) -> None:
    setup.policy.prepare(wire.build_message("A dot."))
    await send_image(setup, client, upstream)
    [item] = setup.policy.requests[0]["input"]
    text, picture = item["content"]
    assert (text["text"], picture["type"], picture["image_url"]) == ("What is it?", "input_image", IMAGE_URL)


async def run_tool_loop(setup: ProxySetup, client: str, upstream: str) -> None:
    """Let the model call a tool twice in parallel, then send back the SDK's turn with both outputs."""
    loops = {"chat": _chat_loop, "responses": _responses_loop, "messages": _messages_loop}
    await loops[client](setup, upstream)


async def _chat_loop(setup: ProxySetup, upstream: str) -> None:
    completions: Any = setup.openai[upstream].chat.completions
    tools = [{"type": "function", "function": {"name": "add", "parameters": ADD}}]
    messages: list[Any] = [{"role": "user", "content": "go"}]
    first = await completions.create(model="any", messages=messages, tools=tools)
    setup.policy.output = [wire.build_message("42 and 2")]
    messages.append(first.choices[0].message.model_dump(exclude_none=True))
    messages += [
        {"role": "tool", "tool_call_id": call.id, "content": _add(call.function.arguments)}
        for call in first.choices[0].message.tool_calls
    ]
    await completions.create(model="any", messages=messages, tools=tools)


async def _responses_loop(setup: ProxySetup, upstream: str) -> None:
    responses: Any = setup.openai[upstream].responses
    tools = [{"type": "function", "name": "add", "parameters": ADD, "strict": True}]
    items: list[Any] = [{"role": "user", "content": "go"}]
    first = await responses.create(model="any", input=items, tools=tools)
    setup.policy.output = [wire.build_message("42 and 2")]
    items += [item.model_dump(exclude_none=True) for item in first.output]
    for item in first.output:
        if item.type == "function_call":
            items.append(wire.build_function_call_output(item.call_id, _add(item.arguments)))
    await responses.create(model="any", input=items, tools=tools)


async def _messages_loop(setup: ProxySetup, upstream: str) -> None:
    messages: Any = setup.anthropic[upstream].messages
    tools = [{"name": "add", "input_schema": ADD}]
    options: dict[str, Any] = {"model": "any", "max_tokens": 4096, "tools": tools}
    sent: list[Any] = [{"role": "user", "content": "go"}]
    first = await messages.create(messages=sent, **options)
    setup.policy.output = [wire.build_message("42 and 2")]
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": _add(json.dumps(block.input))}
        for block in first.content
        if block.type == "tool_use"
    ]
    sent += [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    await messages.create(messages=sent, **options)


def _add(arguments: str) -> str:
    given = json.loads(arguments)
    return str(given["a"] + given["b"])


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("upstream", UPSTREAMS)
async def test_a_turn_is_sent_back_whole_with_the_outputs_of_its_calls(
    setup: ProxySetup, upstream: str, client: str
) -> None:
    setup.policy.prepare(*TURN)
    await run_tool_loop(setup, client, upstream)
    # Hosted models accept only their own reasoning, identified by an id that Chat Completions does not carry.
    hosted = upstream.startswith("openai")
    thoughts = [] if hosted and "chat" in {client, upstream.partition("-")[2]} else [("reasoning", "hm")]
    assert [summarize(item) for item in setup.policy.requests[1]["input"]] == [
        ("user", "go"),
        *thoughts,
        ("assistant", "I add."),
        ("function_call", {"a": 40, "b": 2}),
        ("function_call", {"a": 1, "b": 1}),
        ("function_call_output", "42"),
        ("function_call_output", "2"),
    ]


def summarize(item: Item) -> tuple[str, Any]:
    """Return the type and the content of *item*."""
    kind = item.get("type", "message")
    if kind == "message":
        return item["role"], extract_text(item["content"])
    if kind == "function_call":
        return kind, json.loads(item["arguments"])
    return kind, extract_text(item["summary"] if kind == "reasoning" else item["output"])


async def request_structured(setup: ProxySetup, client: str, upstream: str) -> Any:
    """Return a structured response as the SDK parses it."""
    openai, anthropic = setup.openai[upstream], setup.anthropic[upstream]
    messages: list[Any] = [{"role": "user", "content": "40 + 2?"}]
    if client == "chat":
        completion = await openai.chat.completions.parse(model="any", messages=messages, response_format=Sum)
        return completion.choices[0].message.parsed
    if client == "responses":
        response = await openai.responses.parse(model="any", input="40 + 2?", text_format=Sum)
        return response.output_parsed
    message = await anthropic.messages.parse(model="any", max_tokens=4096, messages=messages, output_format=Sum)
    return message.parsed_output


@pytest.mark.slow
@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("upstream", UPSTREAMS)
async def test_a_response_has_the_requested_format(setup: ProxySetup, upstream: str, client: str) -> None:
    setup.policy.prepare(wire.build_message('{"total": 42}'))
    assert await request_structured(setup, client, upstream) == Sum(total=42)
    form = setup.policy.requests[0]["text"]["format"]
    assert (form["type"], form["schema"]["required"]) == ("json_schema", ["total"])


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["/ng-rollout/r1", "/ng-rollout/r1/training-token-capture"])
@pytest.mark.parametrize("client", CLIENTS)
async def test_a_rollouts_prefix_is_stripped(setup: ProxySetup, client: str, prefix: str) -> None:
    setup.policy.prepare(wire.build_message("42"))
    url, messages = setup.urls["vllm"] + prefix, [{"role": "user", "content": "hi"}]
    openai = setup.openai["vllm"].with_options(base_url=f"{url}/v1")
    creates: dict[str, Any] = {
        "chat": lambda: openai.chat.completions.create(model="any", messages=messages, stream=True),  # type: ignore[arg-type]  # a plain dict suffices in a test
        "responses": lambda: openai.responses.create(model="any", input="hi", stream=True),
        "messages": lambda: (
            setup.anthropic["vllm"]
            .with_options(base_url=url)
            .messages.create(model="any", max_tokens=9, messages=messages, stream=True)  # type: ignore[arg-type]  # a plain dict suffices in a test
        ),
    }
    assert "42" in str([event async for event in await creates[client]()])
