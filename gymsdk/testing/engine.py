"""An engine: a policy asked in the words of any API, its room bounded, its tokens told where they are asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, TypeAlias

from gymsdk import responses
from gymsdk.convert import chat_inbound, content
from gymsdk.convert import content as parts
from gymsdk.convert.api import InboundApi, InvalidRequest
from gymsdk.convert.chat import LOGPROBS_INCLUDE
from gymsdk.convert.tokens import TOKEN_ID_PREFIX, wants_tokens
from gymsdk.errors import UsageError
from gymsdk.responses import is_policy_item
from gymsdk.testing.faults import Fate, Faults
from gymsdk.tokens import chatml
from gymsdk.tokens.chatml import SpecialToken
from gymsdk.tokens.parse import parse_output
from gymsdk.tokens.tokenizer import ByteTokenizer
from gymsdk.types import Item, Model, extract_text, is_reply

BYTES = ByteTokenizer()


@dataclass(frozen=True, slots=True)
class Prompt:
    """The *messages* of a chat, their content text, and the *tools* on offer."""

    messages: list[Item]
    tools: list[Item]

    def turn(self) -> int:
        """Give how many turns the policy has had in it."""
        return sum(message["role"] == "assistant" for message in self.messages)

    def size(self) -> int:
        """Give how many ids it has."""
        pieces = chatml.render_pieces(self.messages, tools=self.tools, add_generation_prompt=True)
        return sum(1 if isinstance(piece, SpecialToken) else prompts_size(piece) for piece in pieces)

    def ids(self, *, add_generation_prompt: bool = True) -> list[int]:
        """Give the ids, those after which the policy goes on the last where a *generation prompt* is added."""
        return BYTES.apply_chat_template(self.messages, tools=self.tools, add_generation_prompt=add_generation_prompt)


def of_chat(body: Item) -> Prompt:
    """Give the prompt of a chat *body*, its messages to the letter."""
    told = [message | {"content": _text(message.get("content"))} for message in body["messages"]]
    return Prompt(told, body.get("tools") or [])


def of_request(request: Item) -> Prompt:
    """Give the prompt of a Responses *request*."""
    given = request.get("input") or []
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    instructions = request.get("instructions")
    lead = [{"role": "system", "content": instructions}] if instructions else []
    return Prompt([*lead, *_messages(items)], [_tool(tool) for tool in request.get("tools") or []])


def prompts_words(output: Iterable[Item], *, thoughts: bool = True) -> str:
    """Give what a policy writes that says its *output*, with its *thoughts* or without."""
    turn = _turn(item for item in output if thoughts or item.get("type") != "reasoning")
    return "".join(piece for piece in [*chatml.render_pieces([turn])][2:-2])


def prompts_size(text: str) -> int:
    """Give how many ids *text* has: one for each byte."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))


def _messages(items: Iterable[Item]) -> Iterator[Item]:
    for by_policy, run in groupby(items, is_policy_item):
        if by_policy:
            yield _turn(run)
        else:
            yield from map(_message, run)


def _message(item: Item) -> Item:
    kind = item.get("type") or "message"
    if kind == "function_call_output":
        return {"role": "tool", "content": _text(item.get("output"))}
    if kind == "message":
        return {"role": item.get("role"), "content": _text(item.get("content"))}
    return {"role": "user", "content": f"[{kind}]"}


def _turn(items: Iterable[Item]) -> Item:
    turn = list(items)
    said = "".join(_text(item.get("content")) for item in turn if is_reply(item))
    calls = [{"function": item} for item in turn if item.get("type") == "function_call"]
    return {"role": "assistant", "content": said, "reasoning_content": parts.join_reasoning(turn), "tool_calls": calls}


def _tool(tool: Item) -> Item:
    return {"type": tool.get("type"), "function": {key: value for key, value in tool.items() if key != "type"}}


def _text(content: object) -> str:
    """The text of *content*; of what is no text in it, its type in brackets."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else ""
    return "".join(extract_text([part]) if "text" in part else f"[{part.get('type')}]" for part in content)


@dataclass(frozen=True, slots=True)
class Generation:
    """The *output* of one turn and the *words* that say it, *whole* unless the room for it ended first."""

    output: list[Item]
    words: str
    whole: bool = True
    size: int = 0

    def ids(self) -> list[int]:
        """Give the ids of its tokens; the last of a whole one ends the turn."""
        written = BYTES.encode(self.words)
        return [*written, BYTES.eos_token_id] if self.whole else written[: self.size]


def generation(output: list[Item], *, turn: int, room: int | None, thoughts: bool, parsed: bool) -> Generation:
    """Give the generation that says *output*, or as much of it as there is *room* for.

    What is left of the *turn* is taken apart again, its calls only where they are *parsed*; *thoughts* says that they
    are told.
    """
    words = prompts_words(output, thoughts=thoughts)
    size = prompts_size(words) + 1
    if room is None or size <= room:
        return Generation(output, words, size=size)
    left = _unmarked(words.encode("utf-8", "replace")[:room].decode("utf-8", "ignore"))
    return Generation(_apart(left, turn=turn, parsed=parsed), words, whole=False, size=room)


def alone(output: list[Item]) -> list[Item]:
    """Give *output* with no call but the first."""
    first = next((item for item in output if item.get("type") == "function_call"), None)
    return [item for item in output if item is first or item.get("type") != "function_call"]


def malformed(output: list[Item]) -> list[Item]:
    """Give *output* with half of the arguments of its first call."""
    first = next((item for item in output if item.get("type") == "function_call"), None)
    return [item | {"arguments": _half(item["arguments"])} if item is first else item for item in output]


def unparsed(output: list[Item]) -> list[Item]:
    """Give *output* with its calls as the policy wrote them, in the text."""
    calls = [chatml.format_tool_call(item) for item in output if item.get("type") == "function_call"]
    if not calls:
        return output
    thoughts = [item for item in output if item.get("type") == "reasoning"]
    return [*thoughts, responses.build_message(prompts_words(output, thoughts=False))]


def chance(token: int, place: int) -> float:
    """Give the log-probability of a *token* at a *place*: -(1 + (31 token + 17 place) mod 97) / 50, always."""
    return -(1 + (31 * token + 17 * place) % 97) / 50


def logprobs(ids: list[int], *, as_ids: bool, top: bool) -> list[Item]:
    """Give the log-probabilities of *ids* as a chat has them; *top* tells each also as the likeliest in its place."""
    return [_likely(token, place, as_ids=as_ids, top=top) for place, token in enumerate(ids)]


def likely(said: Generation, *, top: bool) -> list[Item]:
    """Give the output of what was *said*, each text with the log-probabilities of its tokens, as Responses has them."""
    return [
        item | {"content": [_with(part, said, top=top) for part in item["content"]]} if is_reply(item) else item
        for item in said.output
    ]


def _with(part: Item, said: Generation, *, top: bool) -> Item:
    text = part.get("text")
    if not isinstance(text, str) or not text:
        return part
    before = said.words.partition(text)[0] if text in said.words else ""
    place, ids = prompts_size(before), BYTES.encode(text)
    told = [_likely(token, place + number, as_ids=False, top=top) for number, token in enumerate(ids)]
    return part | {"logprobs": told}


def _likely(token: int, place: int, *, as_ids: bool, top: bool) -> Item:
    text = BYTES.decode([token])
    spelled = [*text.encode()] if token >= 256 else [token]  # noqa: PLR2004 - the first that is no byte
    one: Item = {
        "token": f"{TOKEN_ID_PREFIX}{token}" if as_ids else text,
        "logprob": chance(token, place),
        "bytes": spelled,
    }
    return one | {"top_logprobs": [one] if top else []}


def _apart(words: str, *, turn: int, parsed: bool) -> list[Item]:
    """The output that *words* say; without a parser of calls these stay text."""
    if parsed:
        return parse_output(words).build_items(turn=turn)
    thoughts, text = content.split_think_blocks(words)
    said = [responses.build_message(text)] if text or not thoughts else []
    return [responses.build_reasoning(*thoughts), *said] if thoughts else said


def _unmarked(words: str) -> str:
    """Give *words* that were cut, without the beginning of a mark: to most tokenizers each mark is one token."""
    thinking = words.startswith(content.THINK_START) and content.THINK_END not in words
    mark = content.THINK_END if thinking else content.THINK_START
    if not thinking and not mark.startswith(words):
        return words
    torn = next((size for size in range(len(mark) - 1, 0, -1) if words.endswith(mark[:size])), 0)
    return words[: len(words) - torn]


def _half(arguments: str) -> str:
    return arguments[: (len(arguments) + 1) // 2]


Reasoning: TypeAlias = Literal["field", "tags", "none"]
"""How a chat is told thoughts: in fields of their own, as `<think>` in the text, or not at all."""

ASKING: dict[Reasoning, Item] = {
    "field": {},
    "tags": {"separate_reasoning": False},
    "none": {"include_reasoning": False},
}
"""What of a chat body asks for thoughts in that form."""

NO_PARSER = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'


class BadRequest(InvalidRequest):
    """A request of its API that this engine does not take."""


class Engine:
    """The engine that asks *model*, known as *name*; *bundles* tells a chat the tokens as NeMo RL's server does."""

    def __init__(
        self, model: Model, *, name: str, faults: Faults, reasoning: Reasoning = "field", bundles: bool = False
    ) -> None:
        self.name = name
        self.faults = faults
        self._model = model
        self._asking = ASKING[reasoning]
        self._bundles = bundles
        # What a scripted policy counts by itself leaves out what gives a conversation its structure.
        self._counts = str(getattr(model, "name", "")).startswith("scripted/")

    async def answer(self, face: InboundApi, body: Item, fate: Fate) -> Item:
        """Give the answer to a *body* of the API of *face*; raises `Malformed` or `Failed`."""
        request = face.parse_request(body)
        asked = body | self._asking if self._asking else body
        prompt, used = shown(face, body, request)
        check_request(request, where="input" if "input" in body else "messages")
        self._takes_tools(request)
        room = self._room(request, used)
        response = await responses.query_model_allowing_filtered(self._model, request, episode=None)
        thoughts = face is not chat_inbound.CHAT_API or asked.get("include_reasoning") is not False
        output = self._let(response["output"], request, fate)
        said = generation(output, turn=prompt.turn(), room=room, thoughts=thoughts, parsed=not self.faults.unparsed)
        return self._told(face, asked, request, response | {"model": self.name}, prompt, said, used)

    def _told(
        self, face: InboundApi, asked: Item, request: Item, response: Item, prompt: Prompt, said: Generation, used: int
    ) -> Item:
        response["output"] = said.output
        if not said.whole:
            response |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        ids = _wants_ids(asked)
        if self._counts or ids or not said.whole:
            response["usage"] = responses.build_usage(used, said.size)
        if not ids:
            if LOGPROBS_INCLUDE in (request.get("include") or ()):
                response["output"] = likely(said, top=bool(request.get("top_logprobs")))
            return face.build_answer(response, asked)
        if face is chat_inbound.CHAT_API:
            return self._with_tokens(face.build_answer(response, asked), asked, prompt, said)
        if asked.get("return_token_ids") and said.output:
            response["output"] = [*said.output[:-1], said.output[-1] | _bundle(prompt, said)]
        return face.build_answer(response, asked)

    def _with_tokens(self, answer: Item, asked: Item, prompt: Prompt, said: Generation) -> Item:
        """Give a chat's *answer* with the tokens that were *asked* for."""
        choice, ids = answer["choices"][0], said.ids()
        if asked.get("return_token_ids"):
            answer["prompt_token_ids"], choice["token_ids"] = prompt.ids(), ids
        if asked.get("logprobs"):
            as_ids, top = bool(asked.get("return_tokens_as_token_ids")), bool(asked.get("top_logprobs"))
            choice["logprobs"] = {"content": logprobs(ids, as_ids=as_ids, top=top)}
        if self._bundles and wants_tokens(asked):
            choice["message"] |= _bundle(prompt, said)
        return answer

    def _let(self, output: list[Item], request: Item, fate: Fate) -> list[Item]:
        """The *output* as this engine lets it be said."""
        if request.get("parallel_tool_calls") is False:
            output = alone(output)
        if fate.malformed:
            output = malformed(output)
        return unparsed(output) if self.faults.unparsed else output

    def _takes_tools(self, request: Item) -> None:
        if self.faults.refuses_tools and request.get("tools") and request.get("tool_choice") in (None, "auto"):
            raise BadRequest(NO_PARSER)

    def _room(self, request: Item, used: int) -> int | None:
        """How many tokens the answer may have; raises `BadRequest` where a prompt of *used* tokens leaves none."""
        limit, context = _limit(request), self.faults.context
        if context is None:
            return limit
        length = f"This model's maximum context length is {context} tokens"
        if used >= context:
            raise BadRequest(
                f"{length}. However, your request has {used} input tokens."
                " Please reduce the length of the input messages.",
                "input_tokens",
            )
        if limit is not None and used + limit > context:
            raise BadRequest(
                f"'max_tokens' or 'max_completion_tokens' is too large: {limit}. {length} and your request has"
                f" {used} input tokens ({limit} > {context} - {used}).",
                "max_tokens",
            )
        return context - used if limit is None else limit


def shown(face: InboundApi, body: Item, request: Item) -> tuple[Prompt, int]:
    """Give what a policy is shown for a *body* of the API of *face*, which is the *request*, and how many tokens it is.

    Raises `BadRequest` where it cannot be written.
    """
    try:
        prompt = of_chat(body) if face is chat_inbound.CHAT_API else of_request(request)
        return prompt, prompt.size()
    except (UsageError, LookupError, TypeError, AttributeError) as error:
        raise BadRequest(f"the conversation cannot be written for the policy: {error}") from error


def _limit(request: Item) -> int | None:
    limit: Any = request.get("max_output_tokens")
    if limit is None:
        return None
    if not isinstance(limit, int) or limit < 1:
        raise BadRequest(f"max_tokens must be at least 1, got {limit}.", "max_tokens")
    return limit


def _wants_ids(asked: Item) -> bool:
    return bool(asked.get("return_token_ids") or asked.get("logprobs"))


def _bundle(prompt: Prompt, said: Generation) -> Item:
    ids = said.ids()
    chances = [chance(token, place) for place, token in enumerate(ids)]
    return dict(zip(responses.TOKEN_FIELDS, (prompt.ids(), ids, chances), strict=True))


KEPT = ("previous_response_id", "conversation", "prompt")
"""What names something that a server has kept."""

READ = frozenset({"message", "reasoning", "function_call", "function_call_output"})
"""The types of items that a policy reads."""


def check_request(request: Item, *, where: str) -> None:
    """Raise `Malformed` where a Responses *request* asks for what no policy here has; what was said stood *where*."""
    if kept := next((key for key in KEPT if request.get(key) is not None), None):
        raise InvalidRequest(f"this server keeps nothing that {kept!r} could name; send the whole conversation", kept)
    for number, tool in enumerate(request.get("tools") or []):
        if tool.get("type") != "function":
            sentence = f"tools[{number}]: nobody behind this server runs a tool of type {tool.get('type')!r}"
            raise InvalidRequest(f"{sentence}; offer functions", "tools")
    items = request.get("input")
    if not items and not request.get("instructions"):
        raise InvalidRequest(f"{where!r} is empty; say something in it", where)
    for number, item in enumerate(items if isinstance(items, list) else []):
        kind = item.get("type") or "message"
        if kind not in READ:
            sentence = f"input[{number}]: this server reads no item of type {kind!r}"
            raise InvalidRequest(f"{sentence}; there are {', '.join(sorted(READ))}", f"input[{number}]")
