"""Compute the token ids between two turns without re-encoding the tokens that a policy generated.

A chat template renders a whole conversation, and its rendering of an earlier turn often differs from the generated
tokens: the same text can be tokenized in several ways, and templates drop earlier reasoning. `Bridge` therefore asks
the template to render a placeholder turn in place of the policy's turn. Everything that the template writes after the
placeholder text is what follows the generation. Each rendering is done with two placeholder texts; their common
ending cannot depend on the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gymsdk.errors import UsageError
from gymsdk.tokens.tokenizer import Tokenizer, get_eos_id, get_special_tokens, render_messages
from gymsdk.types import Item

PLACEHOLDER_WORDS = ("one", "six")
"""The texts of the placeholder turns. They end in different letters, so that their common ending is the template's."""


class BridgeError(UsageError):
    """The chat template does not determine which ids follow a generation."""


class TurnEnding(NamedTuple):
    """The ids with which a chat template ends an assistant turn, split at the *terminator*."""

    before: list[int]
    terminator: int
    after: list[int]


class Bridge:
    """Computes the ids between turns of conversations that share a tokenizer and a list of tools.

    Args:
        tokenizer: Provides the chat template.
        tools: The tools that the policy may call, in the format of Chat Completions.
    """

    def __init__(self, tokenizer: Tokenizer, tools: Sequence[Item] = ()) -> None:
        self._tokenizer = tokenizer
        self._tools = list(tools) or None
        self._endings: dict[tuple[str, ...], TurnEnding] = {}

    @property
    def terminator(self) -> int:
        """The id that ends a turn of the policy.

        Raises:
            BridgeError: The chat template ends a turn without a terminator.
        """
        return self._get_ending(()).terminator

    def suffix(
        self,
        generated: Sequence[int],
        messages: Sequence[Item],
        *,
        calls: Sequence[Item] = (),
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Return the ids to append to the *generated* ids so that the policy sees *messages* and can answer them.

        Args:
            generated: The ids that the policy generated in its turn. If the turn was cut off before its terminator,
                the result starts with the terminator, even without messages.
            messages: The chat messages after the turn.
            calls: The tool calls of the turn, in the format of Chat Completions.
            add_generation_prompt: Whether to append the start of the next assistant turn.

        Returns:
            The ids to append.

        Raises:
            BridgeError: The template does not determine these ids. The sequence cannot be extended; the caller must
                start a new one from the rendered conversation.
        """
        ending = self._get_ending(calls)
        following = self._render_after_turn(calls, messages, add_generation_prompt=add_generation_prompt)
        head = [*ending.before, ending.terminator]
        if following[: len(head)] != head:
            raise BridgeError("the chat template ends an assistant turn in another way if messages follow it")
        return _drop_generated(ending, generated, following[len(head) - 1 :])

    def _get_ending(self, calls: Sequence[Item]) -> TurnEnding:
        names = tuple(str(call["function"].get("name")) for call in calls)
        if names not in self._endings:
            self._endings[names] = self._find_ending(calls)
        return self._endings[names]

    def _find_ending(self, calls: Sequence[Item]) -> TurnEnding:
        rendered = self._render_after_turn(calls, [])
        terminators = {get_eos_id(self._tokenizer), *get_special_tokens(self._tokenizer)}
        if calls:
            terminators.add(self.terminator)
        index = next((index for index in reversed(range(len(rendered))) if rendered[index] in terminators), None)
        if index is None and not calls:
            index = self._find_only_visible_token(rendered)
        if index is None:
            raise BridgeError("the chat template ends an assistant turn without a special token")
        return TurnEnding(rendered[:index], rendered[index], rendered[index + 1 :])

    def _find_only_visible_token(self, ids: list[int]) -> int | None:
        """Return the index of the only id that is not white space, `None` if there are none or several."""
        visible = [index for index, token in enumerate(ids) if self._tokenizer.decode([token]).strip()]
        return visible[0] if len(visible) == 1 else None

    def _render_after_turn(
        self, calls: Sequence[Item], messages: Sequence[Item], *, add_generation_prompt: bool = False
    ) -> list[int]:
        """Return the ids that the template writes after the text of a placeholder turn and before the end."""
        first, second = (
            self._render(_build_placeholder_turn(word, calls), messages, add_generation_prompt)
            for word in PLACEHOLDER_WORDS
        )
        if first == second:
            raise BridgeError("the chat template leaves out an assistant turn")
        common = 0
        while common < min(len(first), len(second)) and first[-1 - common] == second[-1 - common]:
            common += 1
        return first[len(first) - common :]

    def _render(self, turn: Item, messages: Sequence[Item], add_generation_prompt: bool) -> list[int]:
        conversation = [{"role": "user", "content": "question"}, turn, *messages]
        try:
            return render_messages(
                self._tokenizer, conversation, tools=self._tools, add_generation_prompt=add_generation_prompt
            )
        except UsageError as error:
            raise BridgeError(str(error)) from error


def _build_placeholder_turn(word: str, calls: Sequence[Item]) -> Item:
    if not calls:
        return {"role": "assistant", "content": word}
    placeholders = [
        call | {"function": {"name": call["function"].get("name"), "arguments": {"argument": word}}} for call in calls
    ]
    return {"role": "assistant", "content": word, "tool_calls": placeholders}


def _drop_generated(ending: TurnEnding, generated: Sequence[int], following: list[int]) -> list[int]:
    """Return *following* without the part of the turn's ending that the policy generated itself."""
    expected = [ending.terminator, *ending.after]
    for count in range(len(expected), 0, -1):
        if list(generated[-count:]) == expected[:count] == following[:count]:
            return following[count:]
    return following
