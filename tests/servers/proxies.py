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
from gymsdk.responses import build_usage
from gymsdk.servers import model as server
from gymsdk.types import Episode, Item, Model

from .app_helpers import serve_app

NAME = "org/policy-1"
"""The policy's name; some names contain a slash."""

UPSTREAMS = ("endpoint-chat", "endpoint-responses", "vllm", "openai-chat", "openai-responses")
CLIENTS = ("chat", "responses", "messages")
ENDS = {"stop": "end", "end_turn": "end", "tool_calls": "calls", "tool_use": "calls"}
ENDS |= dict.fromkeys(("length", "max_tokens", "max_output_tokens"), "cut")
ENDS |= dict.fromkeys(("content_filter", "refusal"), "withheld")

INTEGER = {"type": "integer"}
ADD: Item = {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "required": ["a", "b"]}
ADD |= {"additionalProperties": False}

Sdks: TypeAlias = tuple[AsyncOpenAI, AsyncAnthropic]
Answer: TypeAlias = ChatCompletion | Response | Message


@dataclass
class PreparedModel:
    """A model with a prepared response that records its requests."""

    output: list[Item] = field(default_factory=list)
    reason: str | None = None
    requests: list[Item] = field(default_factory=list)
    name: str = NAME

    def prepare(self, *output: Item, reason: str | None = None) -> None:
        """Return *output* from now on, truncated for a *reason*."""
        self.output, self.reason = list(output), reason
        self.requests.clear()

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:
        """Answer *request*."""
        self.requests.append(request)
        used = build_usage(3, 4, cached_tokens=1, reasoning_tokens=2)
        ends: Any = {"status": "incomplete" if self.reason else "completed", "reason": self.reason}
        output = [dict(item) for item in self.output]
        return wire.build_response(output, model=self.name, usage=used, request=request, **ends)


@dataclass(frozen=True)
class Content:
    """The content of a response of any API."""

    thoughts: str = ""
    text: str = ""
    calls: tuple[tuple[str, Item], ...] = ()
    end: str = "end"
    tokens: tuple[int, int] = (3, 4)


@dataclass(frozen=True)
class ProxySetup:
    """Proxies in front of one policy endpoint, by the API they use for it, and clients of the proxies."""

    policy: PreparedModel
    upstream: str
    urls: dict[str, str]
    openai: dict[str, AsyncOpenAI]
    anthropic: dict[str, AsyncAnthropic]


@asynccontextmanager
async def run_proxies(upstreams: Sequence[str] = UPSTREAMS, **options: Any) -> AsyncIterator[ProxySetup]:
    """Run proxies in front of a policy endpoint; *options* are options of the models that call the endpoint."""
    policy = PreparedModel()
    async with AsyncExitStack() as stack:
        base = await stack.enter_async_context(testing.serve(testing.build_app(policy, name=NAME)))
        setup = ProxySetup(policy, base, {}, {}, {})
        for upstream in upstreams:
            url = await stack.enter_async_context(serve_app(server.create_app(build_model(upstream, base, **options))))
            setup.urls[upstream] = url
            setup.openai[upstream], setup.anthropic[upstream] = await stack.enter_async_context(sdks(url))
        yield setup


@asynccontextmanager
async def sdks(url: str = "http://gym.test") -> AsyncIterator[Sdks]:
    """Yield the SDKs of OpenAI and Anthropic; both send their calls to the proxy at *url*."""
    async with (
        AsyncOpenAI(base_url=f"{url}/v1", api_key="key-of-the-client", max_retries=0) as openai,
        AsyncAnthropic(base_url=url, api_key="key-of-the-client", max_retries=0) as anthropic,
    ):
        yield openai, anthropic


def clients_at(url: str, both: Sdks, *, retries: int = 0) -> Sdks:
    """Return *both* SDKs with calls to the proxy at *url*, on their existing connections."""
    openai, anthropic = both
    return (
        openai.with_options(base_url=f"{url}/v1", max_retries=retries),
        anthropic.with_options(base_url=url, max_retries=retries),
    )


def build_model(upstream: str, base: str, **options: Any) -> Model:
    """Return the model behind *base*, called through the API that *upstream* names."""
    provider, _, api = upstream.partition("-")
    endpoint = {"base_url": base, "api": api or None, "api_key": "key-of-the-proxy"}
    return model(f"{provider}/{NAME}", **(endpoint | options))


async def request_sum(setup: ProxySetup, client: str, upstream: str, *, streamed: bool) -> Answer:
    """Ask for the sum of two numbers with the SDK of *client*, and offer a tool."""
    return await send_sum_request(client, setup.openai[upstream], setup.anthropic[upstream], streamed=streamed)


async def send_sum_request(client: str, openai: AsyncOpenAI, anthropic: AsyncAnthropic, *, streamed: bool) -> Answer:
    """Ask for the sum of two numbers in the API of *client*."""
    if client == "messages":
        return await _messages(anthropic, streamed=streamed)
    return await (_chat if client == "chat" else _responses)(openai, streamed=streamed)


async def _chat(openai: AsyncOpenAI, *, streamed: bool) -> Answer:
    tool = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": ADD, "strict": True}}
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "40 + 2?"}]
    request: Any = {"model": "any", "messages": messages, "tools": [tool]}
    completions: Any = openai.chat.completions
    if not streamed:
        return await completions.create(**request)
    # With tools or a response format, the SDK raises an error for a truncated response.
    tools = request.pop("tools")
    stream_options = {"include_usage": True}
    async with completions.stream(**request, stream_options=stream_options, extra_body={"tools": tools}) as stream:
        await stream.until_done()
        return stream.current_completion_snapshot


async def _responses(openai: AsyncOpenAI, *, streamed: bool) -> Answer:
    tool = {"type": "function", "name": "add", "description": "Add.", "parameters": ADD, "strict": True}
    request: Any = {"model": "any", "instructions": "Be brief.", "input": "40 + 2?", "tools": [tool]}
    responses: Any = openai.responses
    if not streamed:
        return await responses.create(**request)
    # With tools, the SDK parses their arguments and fails on invalid JSON.
    tools = request.pop("tools")
    async with responses.stream(**request, extra_body={"tools": tools}) as stream:
        *_, last = [event async for event in stream]
    return last.response


async def _messages(anthropic: AsyncAnthropic, *, streamed: bool) -> Answer:
    tool = {"name": "add", "description": "Add.", "input_schema": ADD}
    asked: Any = {"system": "Be brief.", "messages": [{"role": "user", "content": "40 + 2?"}]}
    request: Any = {"model": "any", "max_tokens": 4096, "tools": [tool], **asked}
    messages: Any = anthropic.messages
    if not streamed:
        return await messages.create(**request)
    async with messages.stream(**request) as stream:
        return await stream.get_final_message()


def read_content(answer: Answer) -> Content:
    """Return the content of *answer*."""
    if isinstance(answer, Message):
        return _of_message(answer)
    return _of_completion(answer) if isinstance(answer, ChatCompletion) else _of_response(answer)


def _of_completion(answer: ChatCompletion) -> Content:
    [choice] = answer.choices
    message = choice.message
    functions = [function.function for function in message.tool_calls or [] if function.type == "function"]
    calls = [(function.name, json.loads(function.arguments)) for function in functions]
    used = answer.usage
    return Content(
        thoughts=(message.model_extra or {}).get("reasoning_content") or "",
        text=message.content or "",
        calls=tuple(calls),
        end=ENDS[choice.finish_reason],
        tokens=(used.prompt_tokens, used.completion_tokens) if used else (0, 0),
    )


def _of_response(answer: Response) -> Content:
    thoughts = [part.text for item in answer.output if item.type == "reasoning" for part in item.summary]
    calls = [(item.name, json.loads(item.arguments)) for item in answer.output if item.type == "function_call"]
    reason = answer.incomplete_details.reason if answer.incomplete_details else None
    used = answer.usage
    return Content(
        thoughts="\n".join(thoughts),
        text=answer.output_text,
        calls=tuple(calls),
        end=ENDS[str(reason)] if reason else "calls" if calls else "end",
        tokens=(used.input_tokens, used.output_tokens) if used else (0, 0),
    )


def _of_message(answer: Message) -> Content:
    calls = [(block.name, block.input) for block in answer.content if block.type == "tool_use"]
    used = answer.usage
    return Content(
        thoughts="\n".join(block.thinking for block in answer.content if block.type == "thinking"),
        text="".join(block.text for block in answer.content if block.type == "text"),
        calls=tuple(calls),
        end=ENDS[str(answer.stop_reason)],
        # Anthropic counts cached tokens separately.
        tokens=(used.input_tokens + (used.cache_read_input_tokens or 0), used.output_tokens),
    )
