"""ChatML: a conversation as turns between marks, its tools and their calls in the Hermes form.

A turn is `<|im_start|>ROLE`, a line break, the words, `<|im_end|>` and a line break. What tools put out is in a turn of
the user's. Nothing that was said is left out later on, thoughts included: a conversation only ever grows at its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum
from itertools import groupby

from gymsdk.convert import parts
from gymsdk.errors import UsageError
from gymsdk.transcript import Content, Item, text_of

from . import hermes
from .marks import plain


class Mark(StrEnum):
    """What structures the conversation, beside its words."""

    TEXT_END = "<|endoftext|>"
    START = "<|im_start|>"
    END = "<|im_end|>"


Piece = Mark | str
"""A mark, or words: a word that spells a mark is none."""


def pieces(
    messages: Iterable[Item], *, tools: Iterable[Item] | None = None, add_generation_prompt: bool = False
) -> Iterator[Piece]:
    """Yield the marks and words of chat *messages*; raises `UsageError` for what is not text."""
    turns = [(_role(message), _words(message)) for message in messages]
    if tools := list(tools or []):
        offer = hermes.offer(tools)
        first = turns.pop(0)[1] if turns and turns[0][0] == "system" else ""
        turns.insert(0, ("system", f"{first}\n\n{offer}" if first else offer))
    for role, run in groupby(turns, key=lambda turn: turn[0]):
        said = [words for _, words in run]
        for words in ["\n".join(said)] if role == "tool" else said:
            yield from (Mark.START, f"{'user' if role == 'tool' else role}\n", words, Mark.END, "\n")
    if add_generation_prompt:
        yield from (Mark.START, "assistant\n")


def text(pieces: Iterable[Piece]) -> str:
    """Give the text of *pieces*; words that spell a mark have a space put after their `<`."""
    runs = groupby(pieces, key=lambda piece: isinstance(piece, Mark))
    return "".join(joined if marks else plain(joined, [*Mark]) for marks, run in runs for joined in ["".join(run)])


def before_marks(written: str) -> str:
    """Give what of *written* stands before the first mark spelled in it, all of it where none is."""
    for mark in Mark:
        written = written.partition(mark)[0]
    return written


def content(given: Content | None) -> str:
    """Give the text of a message's content; raises `UsageError` where it is not text alone."""
    if given is None or isinstance(given, str):
        return given or ""
    for part in given:
        if part.get("type") not in ("text", "input_text", "output_text"):
            raise UsageError(f"a content part of type {part.get('type')!r} is no text; codec='chat' can carry it")
    return text_of(given)


def _role(message: Item) -> str:
    role = message.get("role")
    if role not in {"system", "developer", "user", "assistant", "tool"}:
        raise UsageError(f"a chat message has no role {role!r}; it is system, developer, user, assistant or tool")
    return "system" if role == "developer" else str(role)


def _words(message: Item) -> str:
    words = content(message.get("content"))
    if message["role"] == "tool":
        return hermes.response(words)
    if message["role"] != "assistant":
        return hermes.untagged(words)
    thought = message.get("reasoning_content") or message.get("reasoning") or ""
    calls = [hermes.call(call["function"]) for call in message.get("tool_calls") or []]
    return parts.tagged(thought, "\n".join(filter(None, [words, *calls])))
