"""The bridge between two turns: the ids that follow what a policy generated, none of which is ever written anew.

A chat template gives the ids of a whole conversation, and what it gives for an earlier turn is seldom what the policy
generated: text has many spellings in ids, thoughts are left out. So the template is asked about a made-up turn in place
of the policy's own, and what it writes after the words of that turn is what follows the generation. The words are made
up twice over, and what both leave alike at the end is what does not depend on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gymsdk.errors import UsageError
from gymsdk.tokens import tokenizer as tokenizers
from gymsdk.tokens.tokenizer import Tokenizer, render_messages
from gymsdk.types import Item

PLACEHOLDER_WORDS = ("one", "six")
"""What the made-up turns say: they end in different letters."""


class BridgeError(UsageError):
    """No ids can be proven to follow what was generated: the chat template does not tell."""


class TurnEnding(NamedTuple):
    """How a template ends a policy's turn: what it writes *before* the *terminator*, and what *after* it."""

    before: list[int]
    terminator: int
    after: list[int]


class Bridge:
    """The bridge over the turns of conversations with one *tokenizer* and the same *tools*."""

    def __init__(self, tokenizer: Tokenizer, tools: Sequence[Item] = ()) -> None:
        self._tokenizer = tokenizer
        self._tools = list(tools) or None
        self._known: dict[tuple[str, ...], TurnEnding] = {}

    @property
    def terminator(self) -> int:
        """The id that ends a turn of the policy's; raises `Unbridged` where the template has none."""
        return self._close(()).terminator

    def suffix(
        self,
        generated: Sequence[int],
        messages: Sequence[Item],
        *,
        calls: Sequence[Item] = (),
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Give the ids to append to what was *generated* in a turn, for the policy to see *messages* and answer them.

        *calls* are the tool calls of the turn as they are in a chat message. A turn cut short before its terminator
        gets it, also where there are no messages. Raises `Unbridged` where the template leaves open what the ids are:
        then nothing may be appended, and a conversation that goes on is another one.
        """
        close = self._close(calls)
        following = self._following(calls, messages, add_generation_prompt=add_generation_prompt)
        head = [*close.before, close.terminator]
        if following[: len(head)] != head:
            raise BridgeError("the chat template ends an assistant's turn in another way where messages follow it")
        return _left(close, generated, following[len(head) - 1 :])

    def _close(self, calls: Sequence[Item]) -> TurnEnding:
        shape = tuple(str(call["function"].get("name")) for call in calls)
        if shape not in self._known:
            self._known[shape] = self._discovered(calls)
        return self._known[shape]

    def _discovered(self, calls: Sequence[Item]) -> TurnEnding:
        closing = self._following(calls, [])
        known = {tokenizers.get_eos_id(self._tokenizer), *tokenizers.get_special_tokens(self._tokenizer)}
        if calls:
            known.add(self.terminator)
        last = next((place for place in reversed(range(len(closing))) if closing[place] in known), None)
        if last is None and not calls:
            last = self._lone(closing)
        if last is None:
            raise BridgeError("the chat template ends an assistant's turn with no token of its own")
        return TurnEnding(closing[:last], closing[last], closing[last + 1 :])

    def _lone(self, closing: list[int]) -> int | None:
        """Where the one token is that *closing* has beside white space."""
        found = [place for place, token in enumerate(closing) if self._tokenizer.decode([token]).strip()]
        return found[0] if len(found) == 1 else None

    def _following(
        self, calls: Sequence[Item], messages: Sequence[Item], *, add_generation_prompt: bool = False
    ) -> list[int]:
        """What the template writes after the words of a made-up turn that *messages* follow."""
        one, other = (self._rendered(_turn(word, calls), messages, add_generation_prompt) for word in PLACEHOLDER_WORDS)
        if one == other:
            raise BridgeError("the chat template leaves out an assistant's turn")
        alike = 0
        while alike < min(len(one), len(other)) and one[-1 - alike] == other[-1 - alike]:
            alike += 1
        return one[len(one) - alike :]

    def _rendered(self, turn: Item, messages: Sequence[Item], add_generation_prompt: bool) -> list[int]:
        conversation = [{"role": "user", "content": "question"}, turn, *messages]
        try:
            return render_messages(
                self._tokenizer, conversation, tools=self._tools, add_generation_prompt=add_generation_prompt
            )
        except UsageError as error:
            raise BridgeError(str(error)) from error


def _turn(word: str, calls: Sequence[Item]) -> Item:
    if not calls:
        return {"role": "assistant", "content": word}
    made = [
        call | {"function": {"name": call["function"].get("name"), "arguments": {"argument": word}}} for call in calls
    ]
    return {"role": "assistant", "content": word, "tool_calls": made}


def _left(close: TurnEnding, generated: Sequence[int], ending: list[int]) -> list[int]:
    """What of *ending*, the terminator and all after it, the policy has not generated itself."""
    own = [close.terminator, *close.after]
    for count in range(len(own), 0, -1):
        if list(generated[-count:]) == own[:count] == ending[:count]:
            return ending[count:]
    return ending
