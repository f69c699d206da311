"""Token ids: a policy sees and says ids, which together are exactly the sequence it saw and generated."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from gymsdk.convert import chat
from gymsdk.gym import spaces
from gymsdk.tokens import chatml, hermes
from gymsdk.tokens import tokenizer as tokenizers
from gymsdk.tokens.bridge import Bridge, Unbridged
from gymsdk.tokens.marks import plain
from gymsdk.tokens.spoken import spoken
from gymsdk.tokens.tokenizer import Tokenizer
from gymsdk.transcript import Item, ToolCall

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
        self.tokenizer = tokenizers.tokenizer(tokenizer)
        self._size = tokenizers.size(self.tokenizer)
        self._marks = frozenset(tokenizers.special(self.tokenizer).values())
        self._offered: list[Item] = []
        self._bridge = Bridge(self.tokenizer)
        self._generated: list[int] = []
        self._calls: list[Item] = []
        self._thinking = False
        self.observation_space = spaces.Tokens(self._size)
        self.action_space = spaces.Tokens(self._size)

    def opened(self, opening: Sequence[Item], tools: Sequence[Item]) -> list[int]:
        """Give the ids of the opening messages and of the beginning of the policy's turn."""
        body = chat.body({"input": list(opening), "tools": list(tools)})
        offered = _without(body.get("tools", []), self._marks)
        if offered != self._offered:
            self._offered, self._bridge = offered, Bridge(self.tokenizer, offered)
        self._generated, self._calls = [], []
        messages = self._messages(body["messages"])
        return self._seen(
            tokenizers.rendered(self.tokenizer, messages, tools=offered or None, add_generation_prompt=True)
        )

    def said(self, action: Any, *, turn: int) -> list[Item]:
        """Give the items of a sequence of ids: thoughts, text, calls."""
        self._generated = self.action_space.ids(action)
        ends = self._ends()
        words = [*takewhile(lambda token: token not in ends, self._generated)]
        written = chatml.before_marks(self.tokenizer.decode(words))
        items = spoken(written, thinking=self._thinking).build_items(turn=turn)
        self._calls = [call for message in chat.messages({"input": items}) for call in message.get("tool_calls", [])]
        return items

    def answered(self, items: Sequence[Item], *, over: bool) -> list[int]:
        """Give the ids that end the policy's turn, those of the new messages, and those that begin its next turn."""
        if over and not items:
            return []
        messages = self._messages(chat.messages({"input": list(items)}))
        suffix = self._bridge.suffix(self._generated, messages, calls=self._calls, add_generation_prompt=not over)
        return self._seen(suffix)

    def _messages(self, messages: list[Item]) -> list[Item]:
        return [_without(_told(message), self._marks) for message in messages]

    def _seen(self, ids: list[int]) -> list[int]:
        self._thinking = self.tokenizer.decode(ids[-TAIL:]).rstrip().endswith("<think>")
        return ids

    def _ends(self) -> set[int | None]:
        try:
            return {tokenizers.end(self.tokenizer), self._bridge.terminator}
        except Unbridged:
            # An episode of one turn needs no bridge.
            return {tokenizers.end(self.tokenizer)}


def _told(message: Item) -> Item:
    """A chat message as templates take it: its content one text, the arguments of its calls objects where they are."""
    words = chatml.content(message.get("content"))
    told = message | {"content": words if message["role"] == "assistant" else hermes.untagged(words)}
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
        return plain(value, marks)
    if isinstance(value, list):
        return [_without(each, marks) for each in value]
    return {key: _without(each, marks) for key, each in value.items()} if isinstance(value, dict) else value
