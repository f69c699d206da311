"""Placeholder turns in conversations, and the comparison of renderings that contain them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gymsdk.tokens.read_ids import count_common_beginning
from gymsdk.types import Item, extract_text

QUESTION: Item = {"role": "user", "content": "question"}
"""The message before the turn in a short conversation."""

PLACEHOLDER_WORDS = (("one", "six"), ("yes", "no"), ("blue", "small"), ("2", "7"))
"""Pairs of texts for placeholder turns. The texts of a pair begin and end in different letters, so that the common
ending of their renderings is the template's. Further pairs are for tokenizers that do not know the first."""

MAX_GENERATED_END = 32
"""The number of ids at the end of a generation that are compared with the ids that the template writes after it."""

MAX_WORD_PAIRS = 8
"""The number of additional pairs that are tried."""


class TurnEnding(NamedTuple):
    """The ids that a chat template writes after the text of an assistant turn, or after the arguments of its last call.

    Attributes:
        final: The ids if no message follows the turn.
        common: The ids at the start of *final* that the template also writes if a message follows the turn.
        terminator: The index in *final* of the special token that ends the turn; `None` if *final* has no such token,
            or if the template ends the turn in another way before a message.
        placeholder: The ids of the placeholder text itself.
    """

    final: list[int]
    common: list[int]
    terminator: int | None
    placeholder: list[int]


def place_word(turn: Item, word: str) -> Item:
    """Return *turn* with a placeholder in place of its text, or of the arguments of its calls if it has any."""
    if not turn.get("tool_calls"):
        return turn | {"content": word}
    arguments = json.dumps({"argument": word})
    calls = [call | {"function": call["function"] | {"arguments": arguments}} for call in turn["tool_calls"]]
    return turn | {"tool_calls": calls}


def build_short_conversation(calls: Sequence[Item]) -> list[Item]:
    # Some templates reject a turn with both text and calls.
    turn: Item = {"role": "assistant", "content": "" if calls else "answer"}
    return [QUESTION, turn | {"tool_calls": [*calls]} if calls else turn]


def build_outputs(calls: Sequence[Item]) -> list[Item]:
    return [{"role": "tool", "tool_call_id": call.get("id"), "content": "output"} for call in calls]


def find_following(first: list[int], rendered: list[int], ending: TurnEnding) -> tuple[list[int], int] | None:
    """Find the ids after the text of a turn, in which the renderings *first* and *rendered* agree.

    Returns:
        The ids, and the index of the terminator in them; `None` if the renderings do not show where the ids begin.
    """
    if ending.terminator is None:
        return None
    common = get_common_ending(first, rendered)
    # The real turn may share only a part of what precedes the terminator, such as the end of its arguments.
    for missing in range(ending.terminator + 1):
        head = ending.final[missing : ending.terminator + 1]
        if common[: len(head)] == head:
            whole_ending = [*ending.final[:missing], *common]
            return (common, len(head) - 1) if follows_placeholder(first, whole_ending, ending.placeholder) else None
    return None


def follows_placeholder(rendered: list[int], ending: list[int], placeholder: list[int]) -> bool:
    """Return whether *rendered* ends with the *placeholder* and the *ending*.

    The first id of the placeholder depends on the text before it.
    """
    expected = [*(placeholder[1:] or placeholder), *ending]
    return rendered[len(rendered) - len(expected) :] == expected


def get_common_ending(first: list[int], second: list[int]) -> list[int]:
    size = count_common_beginning(first[::-1], second[::-1])
    return first[len(first) - size :]


def get_turn_text(message: Item) -> str:
    """Return the text of a chat *message*, or the arguments of its last call without the closing marks."""
    if calls := message.get("tool_calls"):
        return str(calls[-1]["function"].get("arguments")).rstrip('"} ')
    return extract_text(message.get("content") or "").rstrip()


def pair_words(words: Iterable[str]) -> list[tuple[str, str]]:
    """Return pairs of *words* that begin and end in different letters."""
    pairs: list[tuple[str, str]] = []
    unpaired: list[str] = []
    for word in dict.fromkeys(words):
        other_word = next((other for other in unpaired if other[0] != word[0] and other[-1] != word[-1]), None)
        if other_word is None:
            unpaired.append(word)
        else:
            unpaired.remove(other_word)
            pairs.append((other_word, word))
        if len(pairs) == MAX_WORD_PAIRS:
            break
    return pairs


def find_last(ids: Sequence[int], token: int) -> int:
    """Return the index of the last *token* in *ids*, -1 if there is none."""
    return next((index for index in reversed(range(len(ids))) if ids[index] == token), -1)


def drop_generated(generated: Sequence[int], following: list[int]) -> list[int]:
    """Return *following* without the ids at its start that the policy generated itself at its end."""
    for count in range(min(len(generated), len(following), MAX_GENERATED_END), 0, -1):
        if list(generated[-count:]) == following[:count]:
            return following[count:]
    return following
