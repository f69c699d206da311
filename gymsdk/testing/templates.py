"""Chat templates for the test policy, modelled on those of well-known families, and a tokenizer that applies them.

The ids 0 to 255 are bytes, and the special tokens of the template follow. A tokenizer with *pairs* also has tokens for
pairs of letters, so that most texts have several encodings: the policy then writes encodings that the tokenizer itself
would not choose, as real policies do. Only templates write special tokens; text that spells one is encoded as bytes.

The templates are no Jinja: the engine also parses prompts back into messages, by the same `TurnFormat`, and the string
that Jinja renders does not tell a special token from text that spells one.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from types import MappingProxyType, SimpleNamespace
from typing import Literal, TypeAlias

from gymsdk.convert import content
from gymsdk.errors import UsageError
from gymsdk.testing.language_model import SymbolModel
from gymsdk.tokens import chatml
from gymsdk.types import Item

FIRST_SPECIAL_ID = 256

PAIRS = (
    "th",
    "he",
    "in",
    "er",
    "an",
    "on",
    "es",
    "or",
    "te",
    "ar",
    "\n\n",
    '"}',
    "}}",
    "e\n",
    ': "',
    '": ',
    "}\n",
    ">\n",
)
"""The pairs of letters of a tokenizer with pairs. Some of them cross the boundary between text and markup."""


class Marker(str):
    """A special token in a rendered conversation. Text that spells one is a plain string."""

    __slots__ = ()


SPLIT_SHARE = 0.5
"""The share of pairs that a policy writes as two bytes."""

Reasoning: TypeAlias = Literal["keep", "drop_earlier", "drop"]
"""Which reasoning a template renders: all, only that after the last user message, or none."""


@dataclass(frozen=True, slots=True)
class TurnFormat:
    """How a template writes a turn: the special tokens at its start and end, and the text after each of them.

    An empty start or end means that there is no such token.
    """

    start: str
    header: str = ""
    end: str = ""
    separator: str = ""


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A chat template.

    Attributes:
        name: Its name.
        special_tokens: The special tokens, in the order of their ids.
        turns: The format of the turns of each role. Without a format for `system`, system messages are rejected;
            without one for `tool`, tool outputs are rendered as text of the user.
        eos: The token that ends a generation.
        bos: The token at the start of a conversation, if there is one.
        reasoning: Which reasoning is rendered.
        adds_empty_reasoning: Whether the last assistant turn has a reasoning block even if it is empty.
        opens_reasoning: Whether the prompt for the policy's turn ends with `<think>`.
        drops_empty: Whether assistant messages without text and calls are left out.
    """

    name: str
    special_tokens: tuple[str, ...]
    turns: Mapping[str, TurnFormat]
    eos: str
    bos: str = ""
    reasoning: Reasoning = "keep"
    adds_empty_reasoning: bool = False
    opens_reasoning: bool = False
    drops_empty: bool = False

    def render(
        self, messages: Sequence[Item], tools: Iterable[Item] | None, *, add_generation_prompt: bool
    ) -> Iterator[str]:
        """Yield the special tokens and texts of a conversation.

        Raises:
            UsageError: The template cannot express a message.
        """
        if self.bos:
            yield Marker(self.bos)
        turns = [(role, text) for message in self._prepare(messages, tools) for role, text in self._format(message)]
        for role, group in groupby(turns, key=lambda turn: turn[0]):
            texts = [text for _, text in group]
            # Tool outputs in a row are one turn; other messages are a turn each.
            for text in ["\n".join(texts)] if role == "tool" else texts:
                yield from self._render_turn(role, text)
        if add_generation_prompt:
            form = self.turns["assistant"]
            yield from filter(None, (Marker(form.start), form.header))
            if self.opens_reasoning:
                yield f"{chatml.THINK_START}\n"

    def _render_turn(self, role: str, text: str) -> Iterator[str]:
        form = self.turns.get(role) or self.turns["user"]
        yield from filter(None, (Marker(form.start), form.header, text))
        yield from filter(None, (Marker(form.end), form.separator))

    def _prepare(self, messages: Sequence[Item], tools: Iterable[Item] | None) -> list[Item]:
        """Return *messages* with the tools in the system message, and without the reasoning that is not rendered."""
        prepared = [message | {"role": chatml.get_role(message)} for message in messages]
        if listed := list(tools or []):
            system = prepared.pop(0) if prepared and prepared[0]["role"] == "system" else {}
            text = "\n\n".join(filter(None, [_get_text(system), chatml.format_tools(listed)]))
            prepared.insert(0, {"role": "system", "content": text})
        last_user = max((number for number, message in enumerate(prepared) if message["role"] == "user"), default=-1)
        return [self._select_reasoning(message, number, last_user, prepared) for number, message in enumerate(prepared)]

    def _select_reasoning(self, message: Item, number: int, last_user: int, messages: list[Item]) -> Item:
        if message["role"] != "assistant" or self.reasoning == "keep":
            return message
        in_text, text = content.split_think_blocks(_get_text(message))
        reasoning = "\n".join(in_text) or message.get("reasoning_content") or message.get("reasoning") or ""
        bare = {"role": "assistant", "content": text, "tool_calls": message.get("tool_calls")}
        if self.reasoning == "drop" or number < last_user:
            return bare
        if self.adds_empty_reasoning and not reasoning and number == len(messages) - 1:
            return bare | {"content": f"{chatml.THINK_START}\n\n{chatml.THINK_END}\n\n{text}"}
        return bare | {"reasoning_content": reasoning}

    def _format(self, message: Item) -> Iterator[tuple[str, str]]:
        role, text = message["role"], chatml.format_message(message)
        if role == "system" and "system" not in self.turns:
            raise UsageError(f"the chat template {self.name!r} supports no system messages and no tools")
        if role == "assistant" and self.drops_empty and not text.strip():
            return
        yield role, text

    def parse(self, pieces: Iterable[str]) -> tuple[list[Item], list[Item]]:
        """Return the messages and the tools of a rendered conversation, without the start of the policy's next turn."""
        messages: list[Item] = []
        for role, text in self._split_turns(pieces):
            messages += _parse_message(role, text)
        tools = _extract_tools(messages)
        _number_calls(messages)
        return messages, tools

    def _split_turns(self, pieces: Iterable[str]) -> Iterator[tuple[str, str]]:
        starts = {form.start for form in self.turns.values()} - {""}
        start, text = "", ""
        for piece in pieces:
            if not isinstance(piece, Marker):
                text += piece
                continue
            role, body = self._identify(start, text)
            if role and (body.strip() or start):
                yield role, body
            start, text = (piece if piece in starts else ""), ""
        role, body = self._identify(start, text)
        if role not in {"", "assistant"}:
            yield role, body

    def _identify(self, start: str, text: str) -> tuple[str, str]:
        """Return the role and the text of a turn that begins with the special token *start*."""
        forms = [(role, form) for role, form in self.turns.items() if form.start == start]
        # The longest header first: an empty one would match every turn.
        for role, form in sorted(forms, key=lambda role_form: -len(role_form[1].header)):
            if text.startswith(form.header):
                return role, text[len(form.header) :]
        return ("", "") if start == "" else ("user", text)


def _get_text(message: Item) -> str:
    return chatml.extract_content_text(message.get("content"))


def _parse_message(role: str, text: str) -> Iterator[Item]:
    if role in {"user", "tool"} and text.startswith(chatml.TOOL_RESPONSE_TAGS[0]):
        start, end = chatml.TOOL_RESPONSE_TAGS
        for output in re.findall(f"{start}\n(.*?)\n{end}", text, re.DOTALL):
            yield {"role": "tool", "content": output}
    elif role == "assistant":
        parsed = chatml.parse_output(text)
        calls = [{"function": {"name": call.name, "arguments": call.arguments}} for call in parsed.calls]
        yield {
            "role": "assistant",
            "content": parsed.text,
            "reasoning_content": "\n".join(parsed.reasoning),
            "tool_calls": calls,
        }
    else:
        yield {"role": role, "content": text}


def _extract_tools(messages: list[Item]) -> list[Item]:
    """Return the tools that the system message describes, and remove them from it."""
    if not messages or messages[0]["role"] != "system":
        return []
    before, title, after = messages[0]["content"].rpartition("# Tools\n\n")
    tools_text = re.search(r"<tools>\n(.*)\n</tools>", after, re.DOTALL)
    if not title or not tools_text:
        return []
    messages[0]["content"] = before.rstrip("\n")
    if not messages[0]["content"]:
        messages.pop(0)
    return [json.loads(line) for line in tools_text[1].splitlines()]


def _number_calls(messages: list[Item]) -> None:
    """Give calls and their outputs ids in their order."""
    open_ids: list[str] = []
    count = 0
    for message in messages:
        for call in message.get("tool_calls") or []:
            call |= {"id": f"call_{count}", "type": "function"}
            open_ids.append(call["id"])
            count += 1
        if message["role"] == "tool":
            message["tool_call_id"] = open_ids.pop(0) if open_ids else "call_unknown"


_CHATML_TURNS = MappingProxyType(
    {role: TurnFormat("<|im_start|>", f"{role}\n", "<|im_end|>", "\n") for role in ("system", "user", "assistant")}
)
_CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

TEMPLATES = {
    template.name: template
    for template in (
        ChatTemplate("chatml", _CHATML_TOKENS, _CHATML_TURNS, "<|im_end|>"),
        ChatTemplate(
            "qwen", _CHATML_TOKENS, _CHATML_TURNS, "<|im_end|>", reasoning="drop_earlier", adds_empty_reasoning=True
        ),
        ChatTemplate("strip", _CHATML_TOKENS, _CHATML_TURNS, "<|im_end|>", reasoning="drop", opens_reasoning=True),
        ChatTemplate("drop-empty", _CHATML_TOKENS, _CHATML_TURNS, "<|im_end|>", reasoning="drop", drops_empty=True),
        ChatTemplate(
            "gemma",
            ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
            {
                "system": TurnFormat("<start_of_turn>", "system\n", "<end_of_turn>", "\n"),
                "user": TurnFormat("<start_of_turn>", "user\n", "<end_of_turn>", "\n"),
                "assistant": TurnFormat("<start_of_turn>", "model\n", "<end_of_turn>", "\n"),
            },
            "<end_of_turn>",
            bos="<bos>",
        ),
        ChatTemplate(
            "mistral",
            (
                "<s>",
                "</s>",
                "[INST]",
                "[/INST]",
                "[SYSTEM_PROMPT]",
                "[/SYSTEM_PROMPT]",
                "[TOOL_RESULTS]",
                "[/TOOL_RESULTS]",
            ),
            {
                "system": TurnFormat("[SYSTEM_PROMPT]", end="[/SYSTEM_PROMPT]"),
                "user": TurnFormat("[INST]", end="[/INST]"),
                "tool": TurnFormat("[TOOL_RESULTS]", end="[/TOOL_RESULTS]"),
                "assistant": TurnFormat("", end="</s>"),
            },
            "</s>",
            bos="<s>",
        ),
        ChatTemplate(
            "eos-only",
            ("<bos>", "<eos>", "<|User|>", "<|Assistant|>", "<|System|>"),
            {
                "system": TurnFormat("<|System|>"),
                "user": TurnFormat("<|User|>"),
                "assistant": TurnFormat("<|Assistant|>", end="<eos>"),
            },
            "<eos>",
            bos="<bos>",
            reasoning="drop",
        ),
    )
}
"""The chat templates by name.

`chatml` keeps everything; `qwen` drops the reasoning before the last user message; `strip` drops all reasoning and
opens it in the prompt; `drop-empty` also leaves out empty turns of the assistant; `gemma` ends turns with another token
than the end-of-text token; `mistral` writes no token at the start of a turn of the assistant; `eos-only` ends only the
turns of the assistant with a token.
"""


@dataclass(frozen=True)
class TemplateTokenizer:
    """A tokenizer of bytes and, optionally, of pairs of letters, with a chat template.

    Attributes:
        template: The chat template.
        pairs: Whether some pairs of letters are single tokens.
    """

    template: ChatTemplate = field(default_factory=lambda: TEMPLATES["chatml"])
    pairs: bool = False

    def __len__(self) -> int:
        """Return the number of ids."""
        return self._first_pair + (len(PAIRS) if self.pairs else 0)

    @cached_property
    def eos_token_id(self) -> int:
        """The id that ends a generation."""
        return self.special_ids[self.template.eos]

    @cached_property
    def language_model(self) -> SymbolModel:
        """The probabilities of the ids."""
        return SymbolModel(self.eos_token_id)

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """The id of each special token by its text."""
        return {text: FIRST_SPECIAL_ID + number for number, text in enumerate(self.template.special_tokens)}

    @cached_property
    def added_tokens_decoder(self) -> dict[int, SimpleNamespace]:
        """The special tokens by id, in the form of transformers."""
        return {number: SimpleNamespace(content=text, special=True) for text, number in self.special_ids.items()}

    @property
    def _first_pair(self) -> int:
        return FIRST_SPECIAL_ID + len(self.template.special_tokens)

    @cached_property
    def _bytes_by_id(self) -> dict[int, bytes]:
        table = {number: bytes([number]) for number in range(256)}
        if self.pairs:
            table |= {self._first_pair + number: pair.encode() for number, pair in enumerate(PAIRS)}
        return table

    @cached_property
    def _special_by_id(self) -> dict[int, str]:
        return {number: text for text, number in self.special_ids.items()}

    @cached_property
    def _ids_by_bytes(self) -> dict[bytes, int]:
        return {text: number for number, text in self._bytes_by_id.items()}

    @cached_property
    def _pair_pattern(self) -> re.Pattern[bytes]:
        return re.compile("|".join(re.escape(pair) for pair in sorted(PAIRS, key=len, reverse=True)).encode())

    def apply_chat_template(
        self, messages: list[Item], /, *, tools: list[Item] | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        """Return the ids of *messages*."""
        ids: list[int] = []
        rendered = self.template.render(messages, tools, add_generation_prompt=add_generation_prompt)
        # Texts in a row are encoded together: a pair may cross the boundary between a message and the markup.
        for is_marker, group in groupby(rendered, key=lambda piece: isinstance(piece, Marker)):
            if is_marker:
                ids += [self.special_ids[text] for text in group]
            else:
                ids += self.encode("".join(group))
        return ids

    def encode(self, text: str, /, *, add_special_tokens: bool = False) -> list[int]:  # noqa: ARG002  # it adds none
        """Return the ids of *text*, with as many pairs as possible from the left."""
        data = text.encode("utf-8", "replace")
        if not self.pairs:
            return [*data]
        ids: list[int] = []
        end = 0
        for match in self._pair_pattern.finditer(data):
            ids += [*data[end : match.start()], self._ids_by_bytes[match[0]]]
            end = match.end()
        return [*ids, *data[end:]]

    def encode_generation(self, text: str, *, seed: int) -> list[int]:
        """Return ids of *text* as a policy might generate them: with pairs, about half of them are split.

        Args:
            text: The text of the turn.
            seed: Determines which pairs are split.
        """
        ids = self.encode(text)
        if not self.pairs:
            return ids
        rng, first_pair = random.Random(seed), self._first_pair
        split: list[int] = []
        for number in ids:
            if number >= first_pair and rng.random() < SPLIT_SHARE:
                split += self._bytes_by_id[number]
            else:
                split.append(number)
        return split

    def decode(self, ids: Sequence[int], /, *, skip_special_tokens: bool = False) -> str:
        """Return the text of *ids*; invalid UTF-8 becomes U+FFFD.

        Raises:
            UsageError: An id is out of range.
        """
        pieces = self._split(ids)
        return "".join(piece for piece in pieces if not (skip_special_tokens and isinstance(piece, Marker)))

    def find_open_end(self, ids: Sequence[int]) -> int:
        """Return the position of the end-of-turn token of the last turn in *ids*, or the end if it has none."""
        end = self.special_ids.get(self.template.turns["assistant"].end)
        return next((index for index in reversed(range(len(ids))) if ids[index] == end), len(ids))

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Return the bytes of *ids*, which are no special tokens."""
        return b"".join(map(self._bytes_by_id.__getitem__, ids))

    def parse_conversation(self, ids: Sequence[int]) -> tuple[list[Item], list[Item]]:
        """Return the messages and the tools of a prompt: the inverse of `apply_chat_template`.

        The start of the policy's turn at the end of the prompt is left out.
        """
        return self.template.parse(self._split(ids))

    def _split(self, ids: Sequence[int]) -> Iterator[str]:
        """Yield the special tokens of *ids* as `Marker`, and the texts between them."""
        size = len(self)
        if ids and not (min(ids) >= 0 and max(ids) < size):
            wrong = next(number for number in ids if not 0 <= number < size)
            raise UsageError(f"token id {wrong} is out of range; token ids go from 0 to {size - 1}")
        for is_special, group in groupby(ids, key=self._special_by_id.__contains__):
            if is_special:
                yield from (Marker(self._special_by_id[number]) for number in group)
            else:
                yield self.decode_bytes([*group]).decode("utf-8", "replace")
