"""Stretches: what a policy wrote in the Hermes form, cut into thoughts, calls of tools, and the text between them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal, NamedTuple, TypeAlias

from .objects import extent

Kind: TypeAlias = Literal["thought", "call", "text"]

OPEN, CLOSE = "<tool_call>", "</tool_call>"
"""The tags around a call."""

_THOUGHT = "</think>"
_TAG = re.compile(r"</?(?:think|tool_call)>")
_CALL = re.compile(r"</?tool_call>")
_BLANK = re.compile(r"\s*+")


class Stretch(NamedTuple):
    """What stands from *begin* to *end* of a *text*: of which *kind*, and the *words* between its tags."""

    kind: Kind
    text: str
    begin: int
    end: int
    words: str

    @property
    def source(self) -> str:
        """The words with the tags around them."""
        return self.text[self.begin : self.end]


def stretches(text: str) -> Iterator[Stretch]:
    """Yield the stretches of *text* in order, in time that grows as its length does; together they are all of it."""
    done = at = 0
    word, last = _past_blank(text, 0), text.rfind(_THOUGHT)
    while tag := _TAG.search(text, at):
        if tag[0] == "<think>":
            found = _thought(text, tag, closed=tag.end() <= last, leading=tag.start() == word)
        elif tag[0] == OPEN:
            found = _call(text, tag)
        else:
            # A prompt may have opened the thoughts that end here.
            begun = tag[0] == _THOUGHT and done == 0
            found = Stretch("thought", text, 0, tag.end(), text[: tag.start()]) if begun else None
        at = found.end if found else tag.end()
        if found:
            if done < found.begin:
                yield Stretch("text", text, done, found.begin, text[done : found.begin])
            yield found
            done, word = at, _past_blank(text, at)
    if done < len(text):
        yield Stretch("text", text, done, len(text), text[done:])


def _thought(text: str, tag: re.Match[str], *, closed: bool, leading: bool) -> Stretch | None:
    if not (closed or leading):
        return None
    stop = text.index(_THOUGHT, tag.end()) if closed else len(text)
    end = stop + len(_THOUGHT) if closed else stop
    return Stretch("thought", text, tag.start(), end, text[tag.end() : stop])


def _call(text: str, tag: re.Match[str]) -> Stretch:
    whole = extent(text, _past_blank(text, tag.end()))
    following = _CALL.search(text, whole or tag.end())
    if following and following[0] == CLOSE:
        return Stretch("call", text, tag.start(), following.end(), text[tag.end() : following.start()])
    # No tag closes it: what comes after a whole object is no part of the call.
    stop = whole or (following.start() if following else len(text))
    return Stretch("call", text, tag.start(), stop, text[tag.end() : stop])


def _past_blank(text: str, start: int) -> int:
    found = _BLANK.match(text, start)
    return found.end() if found else start
