"""Codecs: peers that put an episode into the words a policy sees, and its actions into output items."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, get_args

from gymsdk.convert import chat
from gymsdk.errors import UsageError, format_suggestion
from gymsdk.gym import spaces
from gymsdk.gym.actions import Turn, spoken
from gymsdk.gym.spaces import Messages, Prose, Turns
from gymsdk.tokens import chatml
from gymsdk.tokens import tokenizer as tokenizers
from gymsdk.tokens.bridge import Bridge, BridgeError
from gymsdk.tokens.chatml import SpecialToken, escape_markers
from gymsdk.tokens.parse import parse_output
from gymsdk.tokens.tokenizer import Tokenizer
from gymsdk.types import Item, ToolCall

if TYPE_CHECKING:
    from gymnasium import Space

    from gymsdk.tokens.tokenizer import Tokenizer

Name: TypeAlias = Literal["chat", "text", "tokens"]
"""What a policy sees and says: chat messages, text, token ids."""

NAMES: tuple[Name, ...] = get_args(Name)


class Codec(Protocol):
    """One episode after another in a policy's own words; it remembers what the episode in hand needs.

    Items are those of the Responses API, as everywhere in gymsdk.
    """

    @property
    def observation_space(self) -> Space[Any]:
        """What the policy sees."""

    @property
    def action_space(self) -> Space[Any]:
        """What the policy says."""

    def opened(self, opening: Sequence[Item], tools: Sequence[Item]) -> Any:
        """Give the first observation of a new episode: its *opening* messages, the schemas of its *tools*."""

    def said(self, action: Any, *, turn: int) -> list[Item]:
        """Give the output items of an *action*, the episode's *turn*-th from 0; raises `UsageError` for what is none.

        Whatever a policy wrote is taken: text that looks like a broken tool call becomes a call the environment can
        answer, or stays text.
        """

    def answered(self, items: Sequence[Item], *, over: bool) -> Any:
        """Give the next observation: what the environment answered, outputs of tools and messages.

        *over* says that the episode is: nothing then asks the policy for another turn. Raises `UsageError`, as `opened`
        does, for what cannot be put into the policy's words.
        """


def codec(name: str, tokenizer: Tokenizer | str | None = None) -> Codec:
    """Give a new codec by *name*; *tokenizer* is for `tokens` alone."""
    if name not in NAMES:
        near = format_suggestion(str(name), NAMES, f"there are {', '.join(NAMES)}")
        raise UsageError(f"no codec named {name!r}{near}")
    if tokenizer is not None and name != "tokens":
        raise UsageError(f"a tokenizer is for codec='tokens'; leave it out, or change codec={name!r}")
    if name == "chat":
        return Chat()
    if name == "text":
        return Text()

    return Tokens(tokenizer)


class Chat:
    """The codec of chat messages."""

    def __init__(self) -> None:
        self.observation_space = Messages()
        self.action_space = Turns()

    def opened(self, opening: Sequence[Item], tools: Sequence[Item]) -> list[Item]:  # noqa: ARG002  # `info` has the tools
        """Give the opening messages."""
        return self.answered(opening)

    def said(self, action: Any, *, turn: int) -> list[Item]:
        """Give the items of a string, an assistant's message, or a list of items."""
        if isinstance(action, Turn):
            return action.copied()
        return [_identified(item, turn, number) for number, item in enumerate(spoken(action))]

    def answered(self, items: Sequence[Item], *, over: bool = False) -> list[Item]:  # noqa: ARG002  # a list just ends
        """Give the new messages."""
        return deepcopy(chat.build_messages({"input": list(items)}))


def _identified(item: Item, turn: int, number: int) -> Item:
    """Give *item* with the ids it lacks, the same every time the turn is taken."""
    if item["type"] != "function_call":
        return {"id": f"{'rs' if item['type'] == 'reasoning' else 'msg'}_{turn}_{number}", **item}
    return {"id": f"fc_{turn}_{number}", **item, "call_id": item.get("call_id") or f"call_{turn}_{number}"}


class Text:
    """The codec of text.

    Observation, action, observation, action and so on, joined without anything between them, are the conversation in
    ChatML with tools in the Hermes form. Every observation but the first begins by ending the policy's last turn,
    unless the action did, also where the environment says nothing to it; and it ends with the words that begin the next
    one, unless the episode is over. Of an episode that ends without an answer the last observation is empty: it ends no
    turn that the policy did not.

    A mark of ChatML in what is said to the policy has a space after its `<`, so that no task and no tool can forge a
    turn. What a policy says ends at its first mark, as its sampling would; the rest of the action is in the
    conversation, but not in the episode.
    """

    def __init__(self) -> None:
        self.observation_space = Prose()
        self.action_space = Prose()
        self._end = ""

    def opened(self, opening: Sequence[Item], tools: Sequence[Item]) -> str:
        """Give the opening messages, the tools offered in the system's, and the beginning of the policy's turn."""
        body = chat.build_body({"input": list(opening), "tools": list(tools)})
        self._end = ""
        return _written(body["messages"], body.get("tools", []))

    def said(self, action: Any, *, turn: int) -> list[Item]:
        """Give the items of a string: thoughts, text, calls."""
        if action not in self.action_space:
            raise UsageError(f"an action of codec='text' is a string, not {type(action).__name__}")
        self._end = _end(action)
        return parse_output(chatml.truncate_at_special_token(action)).build_items(turn=turn)

    def answered(self, items: Sequence[Item], *, over: bool) -> str:
        """Give the end of the policy's turn, the new messages, and the beginning of its next one."""
        if over and not items:
            return ""
        return self._end + _written(chat.build_messages({"input": list(items)}), prompt=not over)


def _written(messages: list[Item], tools: Sequence[Item] = (), *, prompt: bool = True) -> str:
    return chatml.join_pieces(chatml.render_pieces(messages, tools=tools, add_generation_prompt=prompt))


def _end(action: str) -> str:
    """What has to follow *action* for its turn to be over."""
    _, ended, tail = action.rpartition(SpecialToken.END)
    if not ended or tail.strip():
        return f"{SpecialToken.END}\n"
    return "" if tail.endswith("\n") else "\n"


TAIL = 16
"""How many ids of a prompt are read for whether it has opened the policy's thoughts."""


class Tokens:
    """The codec of token ids.

    Observations and actions joined are the sequence of ids the policy saw: what it generated is never written anew, and
    every observation but the first is what the tokenizer's chat template writes after a turn, with the turn's
    terminator where the action lacks it, also where the environment says nothing, and up to where the policy's next
    turn begins, unless the episode is over. Where a template does not tell what that is, `UsageError` says so. Of an
    episode that ends without an answer the last observation is empty: it ends no turn that the policy did not.

    What a policy says ends at its first terminator or mark of ChatML, and is read in the Hermes form, as `Text` reads
    it. Special tokens that a task or a tool spells in its words have a space after their first character, where the
    tokenizer would take them for the tokens; so have the tags around a tool's output.
    """

    def __init__(self, tokenizer: Tokenizer | str | None = None) -> None:
        self.tokenizer = tokenizers.load_tokenizer(tokenizer)
        self._size = tokenizers.get_vocab_size(self.tokenizer)
        self._marks = frozenset(tokenizers.get_special_tokens(self.tokenizer).values())
        self._offered: list[Item] = []
        self._bridge = Bridge(self.tokenizer)
        self._generated: list[int] = []
        self._calls: list[Item] = []
        self._thinking = False
        self.observation_space = spaces.Tokens(self._size)
        self.action_space = spaces.Tokens(self._size)

    def opened(self, opening: Sequence[Item], tools: Sequence[Item]) -> list[int]:
        """Give the ids of the opening messages and of the beginning of the policy's turn."""
        body = chat.build_body({"input": list(opening), "tools": list(tools)})
        offered = _without(body.get("tools", []), self._marks)
        if offered != self._offered:
            self._offered, self._bridge = offered, Bridge(self.tokenizer, offered)
        self._generated, self._calls = [], []
        messages = self._messages(body["messages"])
        return self._seen(
            tokenizers.render_messages(self.tokenizer, messages, tools=offered or None, add_generation_prompt=True)
        )

    def said(self, action: Any, *, turn: int) -> list[Item]:
        """Give the items of a sequence of ids: thoughts, text, calls."""
        self._generated = self.action_space.ids(action)
        ends = self._ends()
        words = [*takewhile(lambda token: token not in ends, self._generated)]
        written = chatml.truncate_at_special_token(self.tokenizer.decode(words))
        items = parse_output(written, thinking=self._thinking).build_items(turn=turn)
        self._calls = [
            call for message in chat.build_messages({"input": items}) for call in message.get("tool_calls", [])
        ]
        return items

    def answered(self, items: Sequence[Item], *, over: bool) -> list[int]:
        """Give the ids that end the policy's turn, those of the new messages, and those that begin its next turn."""
        if over and not items:
            return []
        messages = self._messages(chat.build_messages({"input": list(items)}))
        suffix = self._bridge.suffix(self._generated, messages, calls=self._calls, add_generation_prompt=not over)
        return self._seen(suffix)

    def _messages(self, messages: list[Item]) -> list[Item]:
        return [_without(_told(message), self._marks) for message in messages]

    def _seen(self, ids: list[int]) -> list[int]:
        self._thinking = self.tokenizer.decode(ids[-TAIL:]).rstrip().endswith("<think>")
        return ids

    def _ends(self) -> set[int | None]:
        try:
            return {tokenizers.get_eos_id(self.tokenizer), self._bridge.terminator}
        except BridgeError:
            # An episode of one turn needs no bridge.
            return {tokenizers.get_eos_id(self.tokenizer)}


def _told(message: Item) -> Item:
    """A chat message as templates take it: its content one text, the arguments of its calls objects where they are."""
    words = chatml.extract_content_text(message.get("content"))
    told = message | {"content": words if message["role"] == "assistant" else chatml.escape_tool_response_tags(words)}
    if calls := message.get("tool_calls"):
        told["tool_calls"] = [call | {"function": _unpacked(call["function"])} for call in calls]
    return told


def _unpacked(function: Item) -> Item:
    call = ToolCall(name=str(function.get("name")), arguments=function.get("arguments") or "{}")
    parsed = call.parsed()
    return function if parsed is None else function | {"arguments": parsed}


def _without(value: Any, marks: frozenset[str]) -> Any:
    """A JSON value in none of whose strings a mark stands."""
    if isinstance(value, str):
        return escape_markers(value, marks)
    if isinstance(value, list):
        return [_without(each, marks) for each in value]
    return {key: _without(each, marks) for key, each in value.items()} if isinstance(value, dict) else value
