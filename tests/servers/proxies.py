"""A model server under test: released SDKs as its clients, a policy endpoint behind it in several configurations."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from anthropic import AsyncAnthropic
from anthropic.types import Message
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from gymsdk import model, testing
from gymsdk import responses as wire
from gymsdk.servers import model as server
from gymsdk.types import Episode, Item, Model

from .reached import listening

NAME = "org/policy-1"
"""The policy's name; some names contain a slash."""

UPSTREAMS = ("endpoint-chat", "endpoint-responses", "vllm", "openai-chat", "openai-responses")
CLIENTS = ("chat", "responses", "messages")
ENDS = {
    "stop": "end",
    "end_turn": "end",
    "tool_calls": "calls",
    "tool_use": "calls",
    "length": "cut",
    "max_tokens": "cut",
    "max_output_tokens": "cut",
    "content_filter": "withheld",
    "refusal": "withheld",
}

ADD: Item = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
"""The parameters of the tool that the requests offer."""

Sdks: TypeAlias = tuple[AsyncOpenAI, AsyncAnthropic]
Answer: TypeAlias = ChatCompletion | Response | Message


@dataclass
class Told:
    """A policy with prepared responses that records its requests."""

    output: list[Item] = field(default_factory=list)
    reason: str | None = None
    asked: list[Item] = field(default_factory=list)
    name: str = NAME

    def says(self, *output: Item, reason: str | None = None) -> None:
        """Have it say *output* from now on, cut short for a *reason*."""
        self.output, self.reason = list(output), reason
        self.asked.clear()

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:
        """Answer *request*."""
        self.asked.append(request)
        status: wire.ResponseStatus = "incomplete" if self.reason else "completed"
        used = wire.build_usage(3, 4, cached_tokens=1, reasoning_tokens=2)
        return wire.build_response(
            [dict(each) for each in self.output],
            model=self.name,
            usage=used,
            status=status,
            reason=self.reason,
            request=request,
        )


@dataclass(frozen=True)
class Said:
    """Return the content of a response of any API."""

    thoughts: str = ""
    text: str = ""
    calls: tuple[tuple[str, Item], ...] = ()
    end: str = "end"
    tokens: tuple[int, int] = (3, 4)


@dataclass(frozen=True)
class Rig:
    """Proxies in front of one policy endpoint, by how they ask it, and clients of them."""

    policy: Told
    upstream: str
    urls: dict[str, str]
    openai: dict[str, AsyncOpenAI]
    anthropic: dict[str, AsyncAnthropic]


@asynccontextmanager
async def rigged(upstreams: Sequence[str] = UPSTREAMS, **options: Any) -> AsyncIterator[Rig]:
    """Proxies in front of a policy endpoint; *options* are those of the models that ask it."""
    told = Told()
    async with AsyncExitStack() as stack:
        base = await stack.enter_async_context(testing.serve(testing.build_app(told, name=NAME)))
        rig = Rig(told, base, {}, {}, {})
        for each in upstreams:
            url = await stack.enter_async_context(listening(server.create_app(asking(each, base, **options))))
            rig.urls[each] = url
            rig.openai[each], rig.anthropic[each] = await stack.enter_async_context(sdks(url))
        yield rig


@asynccontextmanager
async def sdks(url: str = "http://gym.test") -> AsyncIterator[Sdks]:
    """The SDKs of both, their calls sent to the proxy at *url*."""
    async with (
        AsyncOpenAI(base_url=f"{url}/v1", api_key="key-of-the-client", max_retries=0) as openai,
        AsyncAnthropic(base_url=url, api_key="key-of-the-client", max_retries=0) as anthropic,
    ):
        yield openai, anthropic


def at(url: str, both: Sdks, *, retries: int = 0) -> Sdks:
    """Return *both* SDKs, their calls sent to the proxy at *url* on the connections that they have."""
    openai, anthropic = both
    return (
        openai.with_options(base_url=f"{url}/v1", max_retries=retries),
        anthropic.with_options(base_url=url, max_retries=retries),
    )


def asking(upstream: str, base: str, **options: Any) -> Model:
    """Return the model behind *base*, asked as *upstream* says."""
    provider, _, api = upstream.partition("-")
    words: dict[str, Any] = {"base_url": base, "api": api or None, "api_key": "key-of-the-proxy"}
    made: Model = model(f"{provider}/{NAME}", **words, **options)
    return made


async def asked(rig: Rig, client: str, upstream: str, *, streamed: bool) -> Answer:
    """Ask for the sum of two numbers with the SDK of *client*, offering a tool."""
    return await added(client, rig.openai[upstream], rig.anthropic[upstream], streamed=streamed)


async def added(client: str, openai: AsyncOpenAI, anthropic: AsyncAnthropic, *, streamed: bool) -> Answer:
    """Ask for the sum of two numbers in the API of *client*."""
    if client == "messages":
        return await _messages(anthropic, streamed=streamed)
    return await (_chat if client == "chat" else _responses)(openai, streamed=streamed)


async def _chat(openai: AsyncOpenAI, *, streamed: bool) -> Answer:
    tool = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": ADD, "strict": True}}
    words: Any = {
        "model": "any",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "40 + 2?"}],
        "tools": [tool],
    }
    completions: Any = openai.chat.completions
    if not streamed:
        whole: ChatCompletion = await completions.create(**words)
        return whole
    # With tools or a response format, the SDK raises an error for a truncated response.
    tools = words.pop("tools")
    counted = {"include_usage": True}
    async with completions.stream(**words, stream_options=counted, extra_body={"tools": tools}) as stream:
        await stream.until_done()
        final: ChatCompletion = stream.current_completion_snapshot
        return final


async def _responses(openai: AsyncOpenAI, *, streamed: bool) -> Answer:
    tool = {"type": "function", "name": "add", "description": "Add.", "parameters": ADD, "strict": True}
    words: Any = {"model": "any", "instructions": "Be brief.", "input": "40 + 2?", "tools": [tool]}
    responses: Any = openai.responses
    if not streamed:
        whole: Response = await responses.create(**words)
        return whole
    # With tools, the SDK parses their arguments and fails on invalid JSON.
    tools = words.pop("tools")
    async with responses.stream(**words, extra_body={"tools": tools}) as stream:
        *_, last = [event async for event in stream]
    final: Response = last.response
    return final


async def _messages(anthropic: AsyncAnthropic, *, streamed: bool) -> Answer:
    tool = {"name": "add", "description": "Add.", "input_schema": ADD}
    words: Any = {
        "model": "any",
        "max_tokens": 4096,
        "system": "Be brief.",
        "messages": [{"role": "user", "content": "40 + 2?"}],
        "tools": [tool],
    }
    messages: Any = anthropic.messages
    if not streamed:
        whole: Message = await messages.create(**words)
        return whole
    async with messages.stream(**words) as stream:
        final: Message = await stream.get_final_message()
        return final


def said(answer: Answer) -> Said:
    """Return what *answer* says."""
    if isinstance(answer, Message):
        return _of_message(answer)
    return _of_completion(answer) if isinstance(answer, ChatCompletion) else _of_response(answer)


def _of_completion(answer: ChatCompletion) -> Said:
    [choice] = answer.choices
    message = choice.message
    functions = [each.function for each in message.tool_calls or [] if each.type == "function"]
    calls = [(each.name, json.loads(each.arguments)) for each in functions]
    used = answer.usage
    return Said(
        thoughts=(message.model_extra or {}).get("reasoning_content") or "",
        text=message.content or "",
        calls=tuple(calls),
        end=ENDS[choice.finish_reason],
        tokens=(used.prompt_tokens, used.completion_tokens) if used else (0, 0),
    )


def _of_response(answer: Response) -> Said:
    thoughts = [part.text for item in answer.output if item.type == "reasoning" for part in item.summary]
    calls = [(item.name, json.loads(item.arguments)) for item in answer.output if item.type == "function_call"]
    reason = answer.incomplete_details.reason if answer.incomplete_details else None
    used = answer.usage
    return Said(
        thoughts="\n".join(thoughts),
        text=answer.output_text,
        calls=tuple(calls),
        end=ENDS[str(reason)] if reason else "calls" if calls else "end",
        tokens=(used.input_tokens, used.output_tokens) if used else (0, 0),
    )


def _of_message(answer: Message) -> Said:
    calls = [(block.name, block.input) for block in answer.content if block.type == "tool_use"]
    used = answer.usage
    return Said(
        thoughts="\n".join(block.thinking for block in answer.content if block.type == "thinking"),
        text="".join(block.text for block in answer.content if block.type == "text"),
        calls=tuple(calls),
        end=ENDS[str(answer.stop_reason)],
        # Anthropic counts cached tokens separately.
        tokens=(used.input_tokens + (used.cache_read_input_tokens or 0), used.output_tokens),
    )
