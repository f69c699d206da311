"""The model server between released SDKs and a model: requests as the model gets them, responses as the SDKs do."""

from __future__ import annotations

import base64
import json
import random
from typing import Any

import httpx
import orjson
import pytest
import pytest_asyncio
from pydantic import BaseModel

from gymsdk import responses as wire
from gymsdk.types import Item, extract_text

from .engines import BODIES
from .proxies import ADD, CLIENTS, NAME, UPSTREAMS, Content, ProxySetup, read_content, request_sum, run_proxies

pytestmark = pytest.mark.asyncio(loop_scope="module")

PIXEL = base64.b64encode(b"\x89PNG\r\n\x1a\n no picture at all").decode()
IMAGE_URL = f"data:image/png;base64,{PIXEL}"
TURN = [
    wire.build_message("I add."),
    wire.build_function_call("add", '{"a":40,"b":2}', "call_1"),
    wire.build_function_call("add", '{"a":1,"b":1}', "call_2"),
]
"""A turn with every kind of item except reasoning."""


class Sum(BaseModel):
    """The model's response."""

    total: int


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def setup():
    """Yield the proxies that the tests of this module share."""
    async with run_proxies() as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize("upstream", UPSTREAMS)
async def test_an_image_arrives(setup, upstream):
    openai, question = setup.openai[upstream], "What is it?"
    chat_parts: Any = [{"type": "text", "text": question}, {"type": "image_url", "image_url": {"url": IMAGE_URL}}]
    image = {"type": "input_image", "image_url": IMAGE_URL, "detail": "auto"}
    source = {"type": "base64", "media_type": "image/png", "data": PIXEL}

    def ask(*parts: Any) -> list[Any]:
        return [{"role": "user", "content": [*parts]}]

    for create, request in (
        (openai.chat.completions.create, {"messages": ask(*chat_parts)}),
        (openai.responses.create, {"input": ask({"type": "input_text", "text": question}, image)}),
        (
            setup.anthropic[upstream].messages.create,
            {"max_tokens": 4096, "messages": ask(chat_parts[0], {"type": "image", "source": source})},
        ),
    ):
        setup.policy.prepare(wire.build_message("A dot."))
        await create(model="any", **request)
        [item] = setup.policy.requests[0]["input"]
        text, picture = item["content"]
        assert (text["text"], picture["type"], picture["image_url"]) == (question, "input_image", IMAGE_URL)


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
async def test_a_turn_is_sent_back_whole_with_the_outputs_of_its_calls(setup, upstream, client):
    # Hosted models accept only their own reasoning, identified by an id that Chat Completions does not carry.
    hosted = upstream.startswith("openai")
    # Some engines refuse a conversation without the empty reasoning that they returned.
    for thought in ("hm", "") if not hosted else ("hm",):
        setup.policy.prepare(wire.build_reasoning(thought), *TURN)
        # The model calls a tool twice in parallel, and the client sends back the SDK's turn with both outputs.
        loops = {"chat": _chat_loop, "responses": _responses_loop, "messages": _messages_loop}
        await loops[client](setup, upstream)
        thoughts = [] if hosted and "chat" in {client, upstream.partition("-")[2]} else [("reasoning", thought)]
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


@pytest.mark.slow
@pytest.mark.parametrize("upstream", UPSTREAMS)
async def test_a_response_has_the_requested_format(setup, upstream):
    openai, anthropic = setup.openai[upstream], setup.anthropic[upstream]
    request: dict[str, Any] = {"model": "any", "messages": [{"role": "user", "content": "40 + 2?"}]}

    async def chat():
        completion = await openai.chat.completions.parse(**request, response_format=Sum)
        return completion.choices[0].message.parsed

    async def responses():
        return (await openai.responses.parse(model="any", input="40 + 2?", text_format=Sum)).output_parsed

    async def messages():
        return (await anthropic.messages.parse(**request, max_tokens=4096, output_format=Sum)).parsed_output

    for parse in (chat, responses, messages):
        setup.policy.prepare(wire.build_message('{"total": 42}'))
        assert await parse() == Sum(total=42)
        form = setup.policy.requests[0]["text"]["format"]
        assert (form["type"], form["schema"]["required"]) == ("json_schema", ["total"])


CALL = wire.build_function_call("add", '{"a":40,"b":2}', "call_1")
OTHER_CALL = wire.build_function_call("add", {"a": 1, "b": 1}, "call_2")
ADDED = ("add", {"a": 40, "b": 2})
THOUGHT, I_ADD = wire.build_reasoning("hm"), wire.build_message("I add.")
BOTH = (ADDED, ("add", {"a": 1, "b": 1}))
RESPONSES: dict[str, tuple[list[Item], str | None, Content]] = {
    "a text": ([wire.build_message("42 é\n\n😀")], None, Content(text="42 é\n\n😀")),
    "an empty text": ([wire.build_message("")], None, Content()),
    "two thoughts": ([wire.build_reasoning("hm\nhm"), wire.build_message("42")], None, Content("hm\nhm", "42")),
    "a call": ([CALL], None, Content(calls=(ADDED,), end="calls")),
    "parallel calls": ([THOUGHT, I_ADD, CALL, OTHER_CALL], None, Content("hm", "I add.", BOTH, "calls")),
    "a truncated text": ([wire.build_message("4")], "max_output_tokens", Content(text="4", end="cut")),
    "a text withheld by a filter": ([wire.build_message("")], "content_filter", Content(end="withheld")),
}


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("upstream", UPSTREAMS)
async def test_every_client_reads_the_models_response(setup, upstream, client):
    for streamed in (False, True):
        for output, reason, expected in RESPONSES.values():
            setup.policy.prepare(*output, reason=reason)
            answer = await request_sum(setup, client, upstream, streamed=streamed)
            assert (read_content(answer), answer.model) == (expected, NAME), streamed
        # Reasoning within the text becomes reasoning.
        setup.policy.prepare(wire.build_message("<think>hm</think>\n\n42"))
        content = read_content(await request_sum(setup, client, upstream, streamed=streamed))
        assert (content.thoughts.strip(), content.text.strip()) == ("hm", "42"), streamed


@pytest.mark.slow
@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("upstream", UPSTREAMS)
async def test_the_model_receives_the_same_request_from_every_client(setup, upstream, client):
    setup.policy.prepare(wire.build_message("42"))
    await request_sum(setup, client, upstream, streamed=True)
    [request] = setup.policy.requests
    # The name that the client gives is ignored.
    assert request.get("model") in {NAME, None}
    assert read_messages(request) == [("system", "Be brief."), ("user", "40 + 2?")]
    [tool] = request["tools"]
    assert (tool["name"], tool["description"], tool["parameters"]) == ("add", "Add.", ADD)
    assert "stream" not in request


def read_messages(request: Item) -> list[tuple[str, str]]:
    """Return the role and the text of each message before the model's turn; instructions have the role `system`."""
    instructions = [("system", request["instructions"])] if request.get("instructions") else []
    messages: Any = request["input"]
    items = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    return instructions + [(item["role"], extract_text(item["content"])) for item in items]


LONG = 65_536


def bundle() -> Item:
    """Return the tokens of a prompt of 1,000 tokens and of the longest response."""
    rng = random.Random(7)
    ids = [rng.randrange(151_936) for _ in range(LONG)]
    return dict(zip(wire.TOKEN_FIELDS, (ids[:1000], ids, [-rng.expovariate(3) for _ in ids]), strict=True))


@pytest.mark.parametrize("path", BODIES)
async def test_token_ids_and_log_probabilities_arrive_and_are_sent_back_to_the_model(setup, path):
    tokens = bundle()
    short = {key: tokens[key][:3] for key in wire.TOKEN_FIELDS}
    async with httpx.AsyncClient(timeout=60) as client:
        for upstream, streamed in (("vllm", True), ("endpoint-responses", False)):
            setup.policy.prepare(wire.build_message("word " * LONG) | tokens)
            url = f"{setup.urls[upstream]}/v1/{path}"
            limit = {"max_tokens": 100_000_000} if path == "messages" else {}
            answer = await client.post(url, json=BODIES[path] | limit | {"stream": streamed})
            assert answer.status_code == 200, answer.text[:500]
            assert all(orjson.dumps(tokens[key]) in answer.content for key in wire.TOKEN_FIELDS)
        setup.policy.prepare(wire.build_message("42") | short)
        url = f"{setup.urls['vllm']}/v1/{path}"
        first = (await client.post(url, json=BODIES[path])).json()
        await client.post(url, json=BODIES[path] | continue_conversation(path, first))
    [*_, message, _] = setup.policy.requests[-1]["input"]
    assert {key: message[key] for key in wire.TOKEN_FIELDS} == short


def continue_conversation(path: str, answer: Item) -> Item:
    """Return the request that continues the conversation after *answer*."""
    asks = {"role": "user", "content": "go on"}
    if path == "responses":
        return {"input": [{"role": "user", "content": "hi"}, *answer["output"], asks]}
    reply = answer["choices"][0]["message"] if path == "chat/completions" else answer
    kept = {key: value for key, value in reply.items() if key in {"content", *wire.TOKEN_FIELDS}}
    return {"messages": [*BODIES[path]["messages"], {"role": "assistant"} | kept, asks]}
