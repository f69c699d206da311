"""A served policy in every API, streamed and not, as the SDKs of OpenAI and Anthropic read it."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

from gymsdk import responses
from gymsdk.models.scripted import build

from .engines import CALLS, FLAT, HELLO, THOUGHT, TOOL, FixedModel, anthropic, endpoint_client, openai, root

TURN = (THOUGHT, responses.build_message("let me see"), *CALLS)
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNkYAAAAAYAAjCB0C8AAAAASUVORK5CYII="
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ADD = {"name": "add", "input_schema": {"type": "object", "properties": {}}}


class Place(BaseModel):
    city: str


def read_message(message: Any) -> tuple[Any, ...]:
    calls = [(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or []]
    return message.content, calls, message.reasoning_content


BOTH = [("c1", "add", '{"a": 1}'), ("c2", "add", '{"a": 2}')]


async def test_a_chat_has_reasoning_text_and_parallel_calls() -> None:
    async with openai(FixedModel(*TURN)) as client:
        answer = await client.chat.completions.create(model="any", tools=[TOOL], **HELLO)
    [choice] = answer.choices
    assert read_message(choice.message) == ("let me see", BOTH, "two sums, then")
    assert (choice.finish_reason, answer.model) == ("tool_calls", "stub")


async def test_a_streamed_chat_adds_up_to_the_same() -> None:
    # With tools, the SDK rejects calls with arguments that it may not parse.
    tools = {"tools": [TOOL]}
    async with (
        openai(FixedModel(*TURN)) as client,
        client.chat.completions.stream(
            model="any", extra_body=tools, stream_options={"include_usage": True}, **HELLO
        ) as stream,
    ):
        async for _ in stream:
            pass
        answer = await stream.get_final_completion()
    [choice] = answer.choices
    assert read_message(choice.message) == ("let me see", BOTH, "two sums, then")
    assert answer.usage is not None
    assert answer.usage.total_tokens == 7


@pytest.mark.parametrize(
    ("reasoning", "content", "field"),
    [
        ("field", "hello", "hm"),
        ("tags", "<think>\nhm\n</think>\n\nhello", None),
        ("none", "hello", None),
    ],
)
async def test_a_chat_contains_reasoning_as_the_engine_is_configured(
    reasoning: str, content: str, field: str | None
) -> None:
    model = FixedModel(responses.build_reasoning("hm"), responses.build_message("hello"))
    async with endpoint_client(model, reasoning=reasoning) as client:
        message = (await client.post("chat/completions", json=HELLO)).json()["choices"][0]["message"]
    assert (message["content"], message.get("reasoning_content")) == (content, field)


@pytest.mark.slow
async def test_a_response_has_reasoning_text_and_parallel_calls_streamed_or_not() -> None:
    async with openai(FixedModel(*TURN)) as client:
        plain = await client.responses.create(model="any", input="hi", tools=[FLAT])
        async with client.responses.stream(model="any", input="hi", tools=[FLAT]) as stream:
            async for _ in stream:
                pass
            streamed = await stream.get_final_response()
    assert [item.type for item in plain.output] == ["reasoning", "message", "function_call", "function_call"]
    items = [[item.model_dump(exclude={"parsed_arguments"}) for item in each.output] for each in (plain, streamed)]
    assert [item["type"] for item in items[0]] == [item["type"] for item in items[1]]
    assert [item.get("arguments") for item in items[0]] == [item.get("arguments") for item in items[1]]
    assert plain.output_text == streamed.output_text == "let me see"


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_message_has_text_and_parallel_tool_use(streamed: bool) -> None:
    request: dict[str, Any] = {"model": "any", "max_tokens": 500, "tools": [ADD], **HELLO}
    async with anthropic(FixedModel(*TURN)) as client:
        if streamed:
            async with client.messages.stream(**request) as stream:
                answer: Any = await stream.get_final_message()
        else:
            answer = await client.messages.create(**request)
    blocks = [block for block in answer.content if block.type != "thinking"]
    assert [block.type for block in blocks] == ["text", "tool_use", "tool_use"]
    assert [block.input for block in blocks[1:]] == [{"a": 1}, {"a": 2}]
    assert (answer.stop_reason, answer.usage.output_tokens) == ("tool_use", 4)


async def test_calls_are_sequential_if_parallel_calls_are_disabled() -> None:
    async with openai(FixedModel(*TURN)) as client:
        chat = await client.chat.completions.create(model="any", tools=[TOOL], parallel_tool_calls=False, **HELLO)
        whole = await client.responses.create(model="any", input="hi", tools=[FLAT], parallel_tool_calls=False)
    assert [call.id for call in chat.choices[0].message.tool_calls or []] == ["c1"]
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]


async def test_images_are_accepted_in_every_api() -> None:
    url, question = f"data:image/png;base64,{PIXEL}", "what is this?"
    async with openai(build("echo")) as client:
        parts = [{"type": "text", "text": question}, {"type": "image_url", "image_url": {"url": url}}]
        chat = await client.chat.completions.create(model="any", messages=[{"role": "user", "content": parts}])
        given = [{"type": "input_text", "text": question}, {"type": "input_image", "image_url": url}]
        whole = await client.responses.create(model="any", input=[{"role": "user", "content": given}])
    async with anthropic(build("echo")) as other:
        source = {"type": "base64", "media_type": "image/png", "data": PIXEL}
        blocks = [{"type": "image", "source": source}, {"type": "text", "text": question}]
        message = await other.messages.create(
            model="any", max_tokens=99, messages=[{"role": "user", "content": blocks}]
        )
    assert chat.choices[0].message.content == whole.output_text == message.content[0].text == question


async def test_structured_output_is_requested_and_read() -> None:
    async with openai(FixedModel(responses.build_message('{"city": "Paris"}'))) as client:
        chat = await client.chat.completions.parse(model="any", response_format=Place, **HELLO)
        whole = await client.responses.parse(model="any", input="hi", text_format=Place)
    assert chat.choices[0].message.parsed == whole.output_parsed == Place(city="Paris")


@pytest.mark.parametrize(
    ("path", "body", "shape"),
    [
        ("chat/completions", {}, {"error"}),
        ("responses", {}, {"error"}),
        ("messages", {"max_tokens": 5}, {"type", "error"}),
    ],
)
async def test_each_api_has_its_own_form_of_errors(path: str, body: dict[str, Any], shape: set[str]) -> None:
    async with endpoint_client(FixedModel()) as client:
        answer = await client.post(path, json=body)
    assert answer.status_code == 400
    assert shape <= answer.json().keys()
    assert answer.json()["error"]["message"]


async def test_the_tokens_of_a_message_are_counted() -> None:
    async with anthropic(FixedModel()) as client:
        counted = await client.messages.count_tokens(model="any", tools=[ADD], **HELLO)
        fewer = await client.messages.count_tokens(model="any", **HELLO)
    assert counted.input_tokens > fewer.input_tokens > 2


async def test_a_prompt_that_cannot_be_counted_is_rejected_in_anthropics_form() -> None:
    async with endpoint_client(FixedModel()) as client:
        answer = await client.post("messages/count_tokens", json={"messages": 7})
    assert (answer.status_code, answer.json()["type"]) == (400, "error")


async def test_an_engine_reports_its_health() -> None:
    async with endpoint_client(FixedModel()) as client:
        assert (await client.get(root(client, "/health"))).status_code == 200
        assert (await client.get(root(client, "/version"))).json()["version"]
        [model] = (await client.get("models")).json()["data"]
    assert (model["id"], model["max_model_len"]) == ("stub", None)
