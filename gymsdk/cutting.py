"""Cutting: what a tool gave, no longer than a policy is to be shown."""

from __future__ import annotations

from collections.abc import Iterator

from gymsdk.transcript import Content, Item

LONGEST = 4 * 2**20
"""Characters of one output where nobody says otherwise; those of pictures and files in it count too."""

NOTE = "\n[cut here: this output has {whole} characters, and at most {longest} of one are shown]"
ABSENT = "[left out: {kind} of {size} characters, where at most {longest} of one output are shown]"


def cut(output: Content, max_chars: int = LONGEST) -> Content:
    """Give *output* as it is, or *longest* characters of it, the last of which say that there was more."""
    if isinstance(output, str):
        return output if len(output) <= max_chars else _text(output, max_chars, max_chars)
    if sum(map(_size, output)) <= max_chars:
        return output
    return [*_parts(output, max_chars)]


def _parts(parts: list[Item], longest: int) -> Iterator[Item]:
    """Yield what fits of *parts*: texts are cut, of anything else half would be none."""
    left = longest
    for part in parts:
        size, text = _size(part), part.get("text")
        if size <= left:
            left -= size
            yield part
        elif isinstance(text, str):
            yield {**part, "text": _text(text, left, longest)}
            left = 0
        else:
            absent = ABSENT.format(kind=part.get("type"), size=size, longest=longest)
            yield {"type": "input_text", "text": absent}


def _text(text: str, left: int, longest: int) -> str:
    note = NOTE.format(whole=len(text), longest=longest)
    return text[: max(0, left - len(note))] + note


def _size(part: Item) -> int:
    return sum(len(value) for value in part.values() if isinstance(value, str))
