"""Calls of an engine that involve token ids: the requests, and who applies the chat template."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from gymsdk import responses
from gymsdk.convert import chat
from gymsdk.convert import tokens as token_fields
from gymsdk.convert.arguments import repair_messages
from gymsdk.convert.chat import CHAT_PATH, CHAT_TEMPLATE_KEY
from gymsdk.convert.late_system import merge_late_system
from gymsdk.convert.token_limits import find_limit_refusal
from gymsdk.errors import Failed, UsageError
from gymsdk.http import client, errors
from gymsdk.models.token_settings import forces_tool, is_constrained
from gymsdk.tokens.bridge import BridgeError, Decoding, Rendering, TokenizerSteps, answer_from_tokenizer
from gymsdk.tokens.tokenizer import Tokenizer
from gymsdk.types import Item

CHAT_ONLY_FIELDS = frozenset(
    {
        "messages",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "chat_template_kwargs",
        "documents",
        "include_reasoning",
        "separate_reasoning",
        "max_completion_tokens",
        "max_tokens",
        "mm_processor_kwargs",
        "reasoning_effort",
        "required_prefix_token_ids",
        "top_logprobs",
        "verbosity",
    }
)
"""The fields of a chat request that a completion request with a token prompt does not have."""

REJECTED_STATUSES = frozenset({400, 422})
"""The statuses with which engines reject the content of a request."""

UNSUPPORTED_STATUSES = REJECTED_STATUSES | {403, 404, 405, 501}
"""The statuses with which engines answer requests to interfaces that they lack or that are switched off."""

ResultT = TypeVar("ResultT")


class EngineRequest(Protocol):
    """Sends a body to a path of the engine and returns the answer, with any status.

    A path that starts with a slash is relative to the root of the server, others to the base URL.
    """

    async def __call__(self, path: str, body: Item) -> client.HttpResponse: ...


class EngineRefusal(Exception):
    """The engine refused a request; `answer` is its answer."""

    def __init__(self, answer: client.HttpResponse) -> None:
        super().__init__(answer.status)
        self.answer = answer


@dataclass(frozen=True, slots=True)
class TokenCall:
    """One call of the model.

    Attributes:
        request: The Responses request.
        body: The chat request.
        send: Sends requests for this call.
        thoughts: How to send earlier reasoning.
        moves_system: Whether the late system messages of the body are user messages.
    """

    request: Item
    body: Item
    send: EngineRequest
    thoughts: responses.ReasoningFormat
    moves_system: bool = False

    def build_new_messages(self, items: list[Item]) -> list[Item]:
        """Return the messages for *items* after the policy's last turn, as the body has them."""
        new = repair_messages(chat.build_messages({"input": items}, thoughts=self.thoughts))
        return merge_late_system(new, is_start=False) if self.moves_system else new

    async def post(self, path: str, body: Item) -> Any:
        """Return the JSON answer to *body* at *path*.

        Raises:
            EngineRefusal: The status is an error.
            Failed: There is no answer.
        """
        answer = await self.send(path, body)
        if not answer.ok:
            raise EngineRefusal(answer)
        return await answer.json_async(exact=False)

    @property
    def template_variables(self) -> Item:
        """The variables that the request passes to the chat template besides the messages and the tools."""
        fields = {"reasoning_effort": effort} if (effort := self.body.get("reasoning_effort")) else {}
        return {**fields, **(self.body.get(CHAT_TEMPLATE_KEY) or {})}

    @property
    def is_constrained(self) -> bool:
        """Whether the engine constrains the decoding of this call."""
        return is_constrained(self.body)

    @property
    def allows_one_call(self) -> bool:
        """Whether the policy may call one tool at most, for which vLLM 0.32 with a tool parser adds a grammar."""
        body = self.body
        return (
            bool(body.get("tools")) and body.get("tool_choice") != "none" and body.get("parallel_tool_calls") is False
        )

    @property
    def forces_tool(self) -> bool:
        """Whether the request requires a tool call."""
        return forces_tool(self.body)


class Renderer(Protocol):
    """Applies the chat template of the model."""

    async def render(self, messages: list[Item], *, add_generation_prompt: bool) -> list[int]:
        """Return the ids of *messages*. Raises `UsageError` if the template rejects them."""

    async def decode(self, ids: list[int]) -> str:
        """Return the text of *ids*, with special tokens."""


class EngineRenderer:
    """The chat template and the tokenizer of an engine with `/tokenize` and `/detokenize`, as vLLM has them."""

    def __init__(self, call: TokenCall) -> None:
        self._call = call
        self._fields = {key: call.body[key] for key in token_fields.PROMPT_FIELDS if key in call.body}
        self.max_model_len: int | None = None
        # Chat completions pass some fields on to the template, which /tokenize does not know.
        if variables := call.template_variables:
            self._fields[CHAT_TEMPLATE_KEY] = variables

    async def render(self, messages: list[Item], *, add_generation_prompt: bool) -> list[int]:
        """Return the ids of *messages*. Raises `UsageError` if the template rejects them."""
        body = self._fields | {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            answer = await self._call.post("/tokenize", body)
        except EngineRefusal as error:
            raise _convert_refusal(error) from error
        self.max_model_len = answer.get("max_model_len")
        return token_fields.check_ids(answer.get("tokens"), "/tokenize")

    async def decode(self, ids: list[int]) -> str:
        """Return the text of *ids*, with special tokens."""
        answer = await self._call.post("/detokenize", {"model": self._call.body.get("model"), "tokens": ids})
        return str(answer.get("prompt"))


class GenerateRenderer(EngineRenderer):
    """The chat template of an engine with `/v1/chat/completions/render`, which also returns the sampling parameters."""

    def __init__(self, call: TokenCall) -> None:
        super().__init__(call)
        self.rendered: Item = {}

    async def render(self, messages: list[Item], *, add_generation_prompt: bool) -> list[int]:
        """Return the ids of *messages*. Raises `UsageError` if the template rejects them."""
        body = self._call.body | {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            self.rendered = await self._call.post(f"{CHAT_PATH}/render", body)
        except EngineRefusal as error:
            raise _convert_refusal(error) from error
        return token_fields.check_ids(self.rendered.get("token_ids"), "render")


class LocalRenderer:
    """A tokenizer of this process."""

    def __init__(self, tokenizer: Tokenizer, call: TokenCall) -> None:
        self._tokenizer = tokenizer
        self._tools = call.body.get("tools")
        template = call.body.get("chat_template")
        self._variables = call.template_variables | ({"chat_template": template} if template else {})

    async def render(self, messages: list[Item], *, add_generation_prompt: bool) -> list[int]:
        """Return the ids of *messages*. Raises `UsageError` if the template rejects them."""
        request = Rendering(messages, add_generation_prompt)
        # In a thread, because the rendering of a long conversation would hold the event loop.
        ids = await asyncio.to_thread(answer_from_tokenizer, self._tokenizer, request, self._tools, self._variables)
        assert isinstance(ids, list), "a rendering is a list of ids"
        return ids

    async def decode(self, ids: list[int]) -> str:
        """Return the text of *ids*, with special tokens."""
        return self._tokenizer.decode(ids)


async def run_steps(steps: TokenizerSteps[ResultT], renderer: Renderer) -> ResultT:
    """Run a computation of `TemplateBridge` with *renderer* and return its result.

    Raises:
        BridgeError: The chat template does not determine the result.
    """
    result: object = None
    error: BridgeError | None = None
    while True:
        try:
            request = steps.send(result) if error is None else steps.throw(error)
        except StopIteration as stop:
            value: ResultT = stop.value
            return value
        error = None
        try:
            if isinstance(request, Decoding):
                result = await renderer.decode(request.ids)
            else:
                result = await renderer.render(request.messages, add_generation_prompt=request.add_generation_prompt)
        except UsageError as refusal:
            error = BridgeError(str(refusal))
            error.__cause__ = refusal


def relax_tools(body: Item) -> Item:
    """Return a chat request whose tools are not `strict`.

    vLLM with a tool parser decodes under a grammar if a tool is strict, even with `tool_choice: auto`. The
    log-probabilities of such a call are not those of the policy.
    """
    tools = body.get("tools")
    if not isinstance(tools, list) or not any(_is_strict(tool) for tool in tools):
        return body
    return body | {"tools": [_relax_tool(tool) if _is_strict(tool) else tool for tool in tools]}


def _is_strict(tool: Item) -> bool:
    return "strict" in (tool.get("function") or {})


def _relax_tool(tool: Item) -> Item:
    return tool | {"function": {key: value for key, value in tool["function"].items() if key != "strict"}}


def build_completion_body(body: Item, ids: list[int], max_model_len: int | None) -> Item:
    """Return the completion request with the token prompt *ids* for a chat request."""
    limit = get_limit(body)
    if limit is None and max_model_len is not None:
        # A prompt that fills the context is sent all the same, for the engine to refuse it.
        limit = max(max_model_len - len(ids), 1)
    return {key: value for key, value in body.items() if key not in CHAT_ONLY_FIELDS} | {
        "prompt": ids,
        "max_tokens": limit,
        "logprobs": 0,
        "add_special_tokens": False,
    }


def get_limit(body: Item) -> int | None:
    """Return the maximum number of tokens that a chat request sets, `None` if it sets none."""
    limit: int | None = body.get("max_completion_tokens", body.get("max_tokens"))
    return limit


def _convert_refusal(refusal: EngineRefusal) -> Exception:
    """Return the error for a rendering that the engine refused: a `UsageError` if the template rejects the messages."""
    answer = refusal.answer
    if answer.status in REJECTED_STATUSES and find_limit_refusal(answer.status, answer.body) is None:
        return UsageError(f"the chat template rejects the messages: {errors.parse_refusal(answer.text)[0]}")
    return refusal


def build_no_ids_error(name: str) -> Failed:
    """Return the error for the model *name* on an engine that returns no token ids."""
    advice = "serve the model with vLLM 0.10 or newer, or leave out --token-ids to evaluate without them"
    return Failed(f"{name} returns no token ids; training needs them; {advice}", kind="model_no_token_ids")
