"""Simulate an inference engine: prompts, context limits, tokens and log-probabilities of a scripted policy."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType
from typing import Literal, TypeAlias

from gymsdk import responses
from gymsdk.convert import chat_inbound, content
from gymsdk.convert.api import InboundApi, InvalidRequest, get_integer
from gymsdk.convert.chat import LOGPROBS_INCLUDE
from gymsdk.convert.tokens import TOKEN_ID_PREFIX, wants_tokens
from gymsdk.errors import Failed, UsageError
from gymsdk.responses import build_usage
from gymsdk.testing.faults import Faults, RequestFault
from gymsdk.testing.templates import FIRST_SPECIAL_ID, Marker, TemplateTokenizer
from gymsdk.tokens import chatml
from gymsdk.tokens.chatml import THINK_END, THINK_START, parse_output
from gymsdk.types import Item, Model, extract_text, is_policy_item, is_reply

DEFAULT_TOKENIZER = TemplateTokenizer()


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of a chat.

    Attributes:
        messages: The messages, with their content as text.
        tools: The tools.
        tokenizer: The tokenizer with the chat template.
        token_ids: The token IDs, if the client sent them; otherwise the chat template renders them.
    """

    messages: list[Item]
    tools: list[Item]
    tokenizer: TemplateTokenizer = DEFAULT_TOKENIZER
    token_ids: list[int] | None = None

    def count_turns(self) -> int:
        """Return the number of the policy's turns in the prompt."""
        return sum(message["role"] == "assistant" for message in self.messages)

    def count_tokens(self) -> int:
        """Return the number of tokens."""
        if self.token_ids is not None or self.tokenizer.pairs:
            return len(self.get_token_ids())
        # Without pairs, each byte is a token: the ids need not be built only to count them.
        template = self.tokenizer.template
        pieces = template.render(self.messages, self.tools, add_generation_prompt=True)
        return sum(1 if isinstance(piece, Marker) else count_bytes(piece) for piece in pieces)

    def get_token_ids(self, *, add_generation_prompt: bool = True) -> list[int]:
        """Return the token IDs; with a generation prompt, the policy's turn begins after them."""
        if self.token_ids is not None:
            return self.token_ids
        return self.tokenizer.apply_chat_template(
            self.messages, tools=self.tools, add_generation_prompt=add_generation_prompt
        )


def build_chat_prompt(body: Item, tokenizer: TemplateTokenizer = DEFAULT_TOKENIZER) -> Prompt:
    """Return the prompt of a chat *body*, with its messages unchanged."""
    messages = [message | {"content": _get_text(message.get("content"))} for message in body["messages"]]
    return Prompt(messages, body.get("tools") or [], tokenizer, body.get("input_ids"))


def build_request_prompt(request: Item, tokenizer: TemplateTokenizer = DEFAULT_TOKENIZER) -> Prompt:
    """Return the prompt of a Responses *request*."""
    prompt = request.get("input") or []
    items = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    instructions = request.get("instructions")
    system = [{"role": "system", "content": instructions}] if instructions else []
    tools = [_build_tool(tool) for tool in request.get("tools") or []]
    return Prompt([*system, *_iter_messages(items)], tools, tokenizer)


def render_output(output: Iterable[Item], *, thoughts: bool = True) -> str:
    """Return the text that a policy generates for *output*, with or without reasoning."""
    return chatml.format_message(_build_turn(item for item in output if thoughts or item.get("type") != "reasoning"))


def count_bytes(text: str) -> int:
    """Return the number of bytes of *text*, which is the number of tokens of a tokenizer without pairs."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))


def _iter_messages(items: Iterable[Item]) -> Iterator[Item]:
    for by_policy, run in groupby(items, is_policy_item):
        if by_policy:
            yield _build_turn(run)
        else:
            yield from map(_build_message, run)


def _build_message(item: Item) -> Item:
    kind = item.get("type") or "message"
    if kind == "function_call_output":
        return {"role": "tool", "content": _get_text(item.get("output"))}
    if kind == "message":
        return {"role": item.get("role"), "content": _get_text(item.get("content"))}
    return {"role": "user", "content": f"[{kind}]"}


def _build_turn(items: Iterable[Item]) -> Item:
    turn = list(items)
    text = "".join(_get_text(item.get("content")) for item in turn if is_reply(item))
    calls = [{"function": item} for item in turn if item.get("type") == "function_call"]
    return {
        "role": "assistant",
        "content": text,
        "reasoning_content": content.join_reasoning(turn) or "",
        "tool_calls": calls,
    }


def _build_tool(tool: Item) -> Item:
    return {"type": tool.get("type"), "function": {key: value for key, value in tool.items() if key != "type"}}


def _get_text(value: object) -> str:
    """Return the text of a content *value*; a part without text appears as its type in brackets."""
    if not isinstance(value, list):
        return value if isinstance(value, str) else ""
    return "".join(extract_text([part]) if "text" in part else f"[{part.get('type')}]" for part in value)


@dataclass(frozen=True, slots=True)
class Generation:
    """The output of the policy in one turn.

    Attributes:
        output: The output items; of a truncated generation, the items in the part that fits.
        text: The whole text, before truncation.
        tokenizer: The tokenizer.
        is_complete: Whether the generation was not truncated.
        size: The number of tokens that count as usage.
        ids: The token IDs of a text that the language model wrote; `None` encodes the text.
    """

    output: list[Item]
    text: str
    tokenizer: TemplateTokenizer = DEFAULT_TOKENIZER
    is_complete: bool = True
    size: int = 0
    ids: list[int] | None = None

    def get_token_ids(self) -> list[int]:
        """Return the token IDs; the IDs of a complete turn end with the end-of-turn token."""
        if self.ids is not None:
            return self.ids
        text_ids = encode_generation(self.text, self.tokenizer)
        return [*text_ids, self.tokenizer.eos_token_id] if self.is_complete else text_ids[: self.size]


def encode_generation(text: str, tokenizer: TemplateTokenizer) -> list[int]:
    """Return the token IDs of a generated *text*, which are the same each time."""
    # Not `hash`, which differs between processes.
    return tokenizer.encode_generation(text, seed=zlib.crc32(text.encode("utf-8", "replace")))


def build_generation(
    output: list[Item],
    *,
    turn: int,
    max_tokens: int | None,
    thoughts: bool,
    parsed: bool,
    tokenizer: TemplateTokenizer = DEFAULT_TOKENIZER,
) -> Generation:
    """Return the generation of *output*, truncated to the maximum number of tokens.

    Args:
        output: The output items.
        turn: The index of the turn, for the IDs of items parsed from truncated text.
        max_tokens: The maximum number of tokens, or `None`.
        thoughts: Whether reasoning is part of the text.
        parsed: Whether tool calls in truncated text are parsed.
        tokenizer: The tokenizer.
    """
    text = render_output(output, thoughts=thoughts)
    opens_reasoning = tokenizer.template.opens_reasoning
    if opens_reasoning:
        # The prompt ends with the opening tag.
        text = text.removeprefix(f"{THINK_START}\n") if text.startswith(THINK_START) else f"{THINK_END}\n\n{text}"
    # One more for the token that ends the turn.
    size = (len(encode_generation(text, tokenizer)) if tokenizer.pairs else count_bytes(text)) + 1
    if max_tokens is None or size <= max_tokens:
        return Generation(output, text, tokenizer, size=size)
    fitting = tokenizer.decode_bytes(encode_generation(text, tokenizer)[:max_tokens]).decode("utf-8", "ignore")
    truncated = _drop_partial_marker(f"{THINK_START}\n{fitting}" if opens_reasoning else fitting)
    output = _parse_output(truncated, turn=turn, parsed=parsed)
    return Generation(output, text, tokenizer, is_complete=False, size=max_tokens)


def keep_first_call(output: list[Item]) -> list[Item]:
    """Return *output* without tool calls after the first."""
    first = next((item for item in output if item.get("type") == "function_call"), None)
    return [item for item in output if item is first or item.get("type") != "function_call"]


def truncate_call_arguments(output: list[Item]) -> list[Item]:
    """Return *output* with the arguments of the first call cut in half."""
    first = next((item for item in output if item.get("type") == "function_call"), None)
    return [
        item | {"arguments": item["arguments"][: (len(item["arguments"]) + 1) // 2]} if item is first else item
        for item in output
    ]


def unparse_calls(output: list[Item]) -> list[Item]:
    """Return *output* with its calls as text, as from an engine without a tool call parser."""
    calls = [chatml.format_tool_call(item) for item in output if item.get("type") == "function_call"]
    if not calls:
        return output
    thoughts = [item for item in output if item.get("type") == "reasoning"]
    return [*thoughts, responses.build_message(render_output(output, thoughts=False))]


def write_generation(
    prompt: Prompt, max_tokens: int, request: Item, rng: random.Random, *, parsed: bool, turn: int
) -> Generation:
    """Return a generation that the language model samples after *prompt*."""
    tokenizer = prompt.tokenizer
    ids = tokenizer.language_model.write(
        prompt.get_token_ids(),
        max_tokens,
        temperature=request.get("temperature", 1.0),
        allowed=request.get("allowed_token_ids"),
        rng=rng,
    )
    text = tokenizer.decode(ids, skip_special_tokens=True)
    full_text = f"{THINK_START}\n{text}" if tokenizer.template.opens_reasoning else text
    is_complete = ids[-1] == tokenizer.eos_token_id
    output = _parse_output(full_text, turn=turn, parsed=parsed)
    return Generation(output, text, tokenizer, is_complete=is_complete, size=len(ids), ids=ids)


def build_chat_logprobs(
    prompt: list[int], ids: list[int], *, as_ids: bool, top: bool, tokenizer: TemplateTokenizer
) -> list[Item]:
    """Return the log-probabilities of *ids* after *prompt* in the form of Chat Completions.

    With *top*, `top_logprobs` of each entry contains the same token.
    """
    logprobs = tokenizer.language_model.compute_logprobs(prompt, ids)
    pairs = zip(ids, logprobs, strict=True)
    return [_build_logprob(token, logprob, tokenizer, as_ids=as_ids, top=top) for token, logprob in pairs]


def add_response_logprobs(generation: Generation, *, top: bool) -> list[Item]:
    """Return the output items with the log-probabilities of each text, in the form of the Responses API."""
    return [
        item | {"content": [_add_logprobs(part, generation, top=top) for part in item["content"]]}
        if is_reply(item)
        else item
        for item in generation.output
    ]


def _add_logprobs(part: Item, generation: Generation, *, top: bool) -> Item:
    text = part.get("text")
    if not isinstance(text, str) or not text:
        return part
    before = generation.text.partition(text)[0] if text in generation.text else ""
    tokenizer = generation.tokenizer
    start, ids = encode_generation(before, tokenizer), encode_generation(text, tokenizer)
    return part | {"logprobs": build_chat_logprobs(start, ids, as_ids=False, top=top, tokenizer=tokenizer)}


def _build_logprob(token: int, logprob: float, tokenizer: TemplateTokenizer, *, as_ids: bool, top: bool) -> Item:
    text = tokenizer.decode([token])
    token_bytes = [*text.encode()] if token >= FIRST_SPECIAL_ID else [token]
    entry: Item = {
        "token": f"{TOKEN_ID_PREFIX}{token}" if as_ids else text,
        "logprob": logprob,
        "bytes": token_bytes,
    }
    return entry | {"top_logprobs": [entry] if top else []}


def _parse_output(generated: str, *, turn: int, parsed: bool) -> list[Item]:
    """Parse the *generated* text into output items; unless *parsed*, calls stay text."""
    if parsed:
        return parse_output(generated).build_items(turn=turn)
    thoughts, text = content.split_think_blocks(generated)
    items = [responses.build_message(text)] if text or not thoughts else []
    return [responses.build_reasoning(*thoughts), *items] if thoughts else items


def _drop_partial_marker(text: str) -> str:
    """Remove an incomplete `<think>` or `</think>` tag at the end of truncated text.

    Most tokenizers encode such a tag as one token, so that an engine never returns a part of the tag.
    """
    is_thinking = text.startswith(content.THINK_START) and content.THINK_END not in text
    marker = content.THINK_END if is_thinking else content.THINK_START
    if not is_thinking and not marker.startswith(text):
        return text
    partial_size = next((size for size in range(len(marker) - 1, 0, -1) if text.endswith(marker[:size])), 0)
    return text[: len(text) - partial_size]


EngineKind: TypeAlias = Literal["vllm", "vllm-completions", "nemo-rl", "sglang", "plain"]
"""The engine that the endpoint imitates in its token interfaces.

`vllm` has all of vLLM's: chat completions with ids, `/tokenize`, completions with token prompts, and render, generate
and derender. `vllm-completions` lacks the last three, like older versions. `nemo-rl` keeps the ids that chat messages
bring along. `sglang` takes `input_ids` in chat completions. `plain` returns no ids.
"""

Reasoning: TypeAlias = Literal["field", "tags", "none"]
"""How chat responses show reasoning: in a separate field, as `<think>` in the text, or not at all."""

REASONING_FIELDS: dict[Reasoning, Item] = {
    "field": {},
    "tags": {"separate_reasoning": False},
    "none": {"include_reasoning": False},
}
"""The fields of a chat request that ask for each form of reasoning."""

PROBE_TOKENS = 32
"""The largest number of tokens of a request that the language model answers, if the policy cannot."""

NO_PARSER_MESSAGE = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'


class BadRequest(InvalidRequest):
    """A request that is valid in its API, but that this engine rejects."""


class Engine:
    """Answers requests of any API with a scripted policy or another model.

    Args:
        model: The model that plays.
        name: The name of the model in answers.
        faults: The faults and limits to simulate.
        reasoning: How chat responses show reasoning.
        kind: The engine to imitate: it determines the token interfaces.
        tokenizer: The tokenizer with the chat template.

    Attributes:
        running: The number of requests that the policy is answering.
    """

    def __init__(
        self,
        model: Model,
        *,
        name: str,
        faults: Faults,
        reasoning: Reasoning = "field",
        kind: EngineKind = "vllm",
        tokenizer: TemplateTokenizer = DEFAULT_TOKENIZER,
    ) -> None:
        self.name = name
        self.faults = faults
        self.kind = kind
        self.tokenizer = tokenizer
        self.running = 0
        self._model = model
        self._rng = random.Random(faults.seed)
        self._reasoning_fields = REASONING_FIELDS[reasoning]
        # A scripted policy counts only text, without the markup of the conversation.
        self._computes_usage = str(getattr(model, "name", "")).startswith("scripted/")

    async def answer(self, api: InboundApi, body: Item, fault: RequestFault) -> Item:
        """Return the answer to *body* in the format *api*; raises `InvalidRequest` or `Failed`."""
        return api.join_answers([await self._answer_once(api, body, fault) for _ in range(api.count_answers(body))])

    async def _answer_once(self, api: InboundApi, body: Item, fault: RequestFault) -> Item:
        request = api.parse_request(body)
        options = body | self._reasoning_fields
        prompt, prompt_size = build_prompt(api, body, request, self.tokenizer)
        check_request(request, where="input" if "input" in body else "messages")
        if self.faults.refuses_tools and request.get("tools") and request.get("tool_choice") in (None, "auto"):
            raise BadRequest(NO_PARSER_MESSAGE)
        if self.kind == "nemo-rl" and api is chat_inbound.CHAT_API:
            prompt = _keep_generated_ids(prompt)
            prompt_size = prompt.count_tokens()
        thoughts = api is not chat_inbound.CHAT_API or options.get("include_reasoning") is not False
        max_tokens = self.compute_max_tokens(get_max_tokens(body, LIMIT_FIELDS[api.path]), prompt_size)
        response, generation = await self.generate(request, prompt, max_tokens, fault, thoughts=thoughts)
        return self._build_answer(
            api, options, request, response | {"model": self.name}, prompt, generation, prompt_size
        )

    async def generate(
        self, request: Item, prompt: Prompt, max_tokens: int | None, fault: RequestFault, *, thoughts: bool = True
    ) -> tuple[Item, Generation]:
        """Return the model's Response to *request*, and what it generates after *prompt*."""
        try:
            response = await responses.query_model_allowing_filtered(self._model, request, episode=None)
        except Failed:
            if max_tokens is None or max_tokens > PROBE_TOKENS:
                raise
            # Clients probe an engine with requests for few tokens. An oracle does not know these conversations.
            turn, parsed = prompt.count_turns(), not self.faults.unparsed
            generation = write_generation(prompt, max_tokens, request, self._rng, turn=turn, parsed=parsed)
            return responses.build_response(generation.output, model=self.name, usage=None), generation
        output = self._apply_limits(response["output"], request, fault)
        generation = build_generation(
            output,
            turn=prompt.count_turns(),
            max_tokens=max_tokens,
            thoughts=thoughts,
            parsed=not self.faults.unparsed,
            tokenizer=self.tokenizer,
        )
        return response, generation

    def _build_answer(
        self,
        api: InboundApi,
        body: Item,
        request: Item,
        response: Item,
        prompt: Prompt,
        generation: Generation,
        prompt_size: int,
    ) -> Item:
        response["output"] = generation.output
        if not generation.is_complete:
            response |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        wants_ids = self.kind != "plain" and bool(body.get("return_token_ids") or body.get("logprobs"))
        if self._computes_usage or wants_ids or not generation.is_complete:
            response["usage"] = build_usage(prompt_size, generation.size)
        if not wants_ids:
            if LOGPROBS_INCLUDE in (request.get("include") or ()):
                response["output"] = add_response_logprobs(generation, top=bool(request.get("top_logprobs")))
            return api.build_answer(response, body)
        if api is chat_inbound.CHAT_API:
            return self._with_tokens(api.build_answer(response, body), body, prompt, generation)
        if body.get("return_token_ids") and generation.output:
            response["output"] = [
                *generation.output[:-1],
                generation.output[-1] | _build_token_fields(prompt, generation),
            ]
        return api.build_answer(response, body)

    def _with_tokens(self, answer: Item, body: Item, prompt: Prompt, generation: Generation) -> Item:
        """Add the requested tokens and log-probabilities to a chat response."""
        choice, ids = answer["choices"][0], generation.get_token_ids()
        if body.get("return_token_ids") and self.kind == "sglang":
            choice |= {"prompt_token_ids": prompt.get_token_ids(), "response_token_ids": ids}
        elif body.get("return_token_ids"):
            answer["prompt_token_ids"], choice["token_ids"] = prompt.get_token_ids(), ids
        if body.get("logprobs"):
            as_ids, top = bool(body.get("return_tokens_as_token_ids")), bool(body.get("top_logprobs"))
            before = prompt.get_token_ids()
            logprobs = build_chat_logprobs(before, ids, as_ids=as_ids, top=top, tokenizer=self.tokenizer)
            choice["logprobs"] = {"content": logprobs}
        if self.kind == "nemo-rl" and wants_tokens(body):
            choice["message"] |= _build_token_fields(prompt, generation)
        return answer

    def _apply_limits(self, output: list[Item], request: Item, fault: RequestFault) -> list[Item]:
        """Return *output* with the request's limits and the simulated faults applied."""
        if request.get("parallel_tool_calls") is False:
            output = keep_first_call(output)
        if fault.malformed:
            output = truncate_call_arguments(output)
        return unparse_calls(output) if self.faults.unparsed else output

    def compute_max_tokens(self, limit: int | None, prompt_size: int) -> int | None:
        """Return the maximum number of tokens; raises `BadRequest` if the prompt leaves no room."""
        context = self.faults.context
        if context is None:
            return limit
        length = f"This model's maximum context length is {context} tokens"
        if prompt_size >= context:
            raise BadRequest(
                f"{length}. However, your request has {prompt_size} input tokens."
                " Please reduce the length of the input messages.",
                "input_tokens",
            )
        if limit is not None and prompt_size + limit > context:
            raise BadRequest(
                f"'max_tokens' or 'max_completion_tokens' is too large: {limit}. {length} and your request has"
                f" {prompt_size} input tokens ({limit} > {context} - {prompt_size}).",
                "max_tokens",
            )
        return context - prompt_size if limit is None else limit


def build_prompt(
    api: InboundApi, body: Item, request: Item, tokenizer: TemplateTokenizer = DEFAULT_TOKENIZER
) -> tuple[Prompt, int]:
    """Return the prompt of *body* and its number of tokens; *request* is its form in the Responses API.

    Raises:
        BadRequest: The chat template cannot express the conversation.
    """
    try:
        is_chat = api is chat_inbound.CHAT_API
        prompt = build_chat_prompt(body, tokenizer) if is_chat else build_request_prompt(request, tokenizer)
        return prompt, prompt.count_tokens()
    except (UsageError, LookupError, TypeError, AttributeError) as error:
        raise BadRequest(f"the conversation cannot be rendered for the policy: {error}") from error


def _keep_generated_ids(prompt: Prompt) -> Prompt:
    """Return *prompt* with the ids that its last assistant message brings along, as NeMo RL's server builds it.

    That server renders the conversation, and replaces everything up to the end of this message by its ids. It finds the
    end by counting the tokens that end a generation.
    """
    positions_with_ids = [
        number for number, message in enumerate(prompt.messages) if message.get(responses.TOKEN_FIELDS[1])
    ]
    if not positions_with_ids:
        return prompt
    last, tokenizer = positions_with_ids[-1], prompt.tokenizer
    known_ids = [*prompt.messages[last][responses.TOKEN_FIELDS[0]], *prompt.messages[last][responses.TOKEN_FIELDS[1]]]
    before = tokenizer.apply_chat_template(prompt.messages[: last + 1], tools=prompt.tools)
    rendered = prompt.get_token_ids()
    end = tokenizer.eos_token_id
    positions = [position for position, token in enumerate(rendered) if token == end]
    position = positions[before.count(end) - 1]
    known_ids = known_ids[:-1] if known_ids[-1] == end else known_ids
    return Prompt(prompt.messages, prompt.tools, tokenizer, [*known_ids, *rendered[position:]])


LIMIT_FIELDS = MappingProxyType(
    {
        "chat/completions": ("max_completion_tokens", "max_tokens"),
        "completions": ("max_tokens",),
        "messages": ("max_tokens",),
        "responses": ("max_output_tokens",),
    }
)
"""The fields that limit the tokens of an answer, by the path of the API. The first one counts."""


def get_max_tokens(body: Item, fields: Sequence[str], where: str = "") -> int | None:
    """Return the limit that *body* has in one of *fields*, `None` if it sets none.

    Raises:
        InvalidRequest: The limit is not a positive integer. The message names the field that the client sent.
    """
    field = next((field for field in fields if body.get(field) is not None), fields[0])
    limit = get_integer(body, field, where)
    if limit is not None and limit < 1:
        raise BadRequest(f"{field} must be at least 1, got {limit}.", field)
    return limit


def _build_token_fields(prompt: Prompt, generation: Generation) -> Item:
    before, ids = prompt.get_token_ids(), generation.get_token_ids()
    logprobs = generation.tokenizer.language_model.compute_logprobs(before, ids)
    return dict(zip(responses.TOKEN_FIELDS, (before, ids, logprobs), strict=True))


STORED_REFERENCES = ("previous_response_id", "conversation", "prompt")
"""Fields that refer to something a server has stored."""

READABLE_TYPES = frozenset({"message", "reasoning", "function_call", "function_call_output"})
"""The types of items that a policy reads."""


def check_request(request: Item, *, where: str) -> None:
    """Raise `InvalidRequest` if a test policy cannot answer a Responses *request*; *where* names its input field."""
    if reference := next((key for key in STORED_REFERENCES if request.get(key) is not None), None):
        raise InvalidRequest(
            f"this server stores nothing that {reference!r} could refer to; send the whole conversation", reference
        )
    for number, tool in enumerate(request.get("tools") or []):
        if tool.get("type") != "function":
            sentence = f"tools[{number}]: this server runs no tools of type {tool.get('type')!r}"
            raise InvalidRequest(f"{sentence}; offer functions", "tools")
    items = request.get("input")
    if not items and not request.get("instructions"):
        raise InvalidRequest(f"{where!r} is empty; send at least one message", where)
    for number, item in enumerate(items if isinstance(items, list) else []):
        kind = item.get("type") or "message"
        if kind not in READABLE_TYPES:
            sentence = f"input[{number}]: this server reads no item of type {kind!r}"
            raise InvalidRequest(f"{sentence}; there are {', '.join(sorted(READABLE_TYPES))}", f"input[{number}]")
