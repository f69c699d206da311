"""The form in which the oracle answers: its last turn, with another text in place of the answer."""

from __future__ import annotations

import json
import re
from typing import Any

from gymsdk import responses
from gymsdk.checks.attack import TaskView, Turns
from gymsdk.checks.programs import parse_object
from gymsdk.types import Item, extract_text

# The end of a sentence does not belong to a word, but the point of a number does.
_WORD_END = re.compile(r"[+-]?(?:\w+[.+-])*\w*\Z")
_WORD_START = re.compile(r"\w*(?:[.+-]\w+)*")

_MARKS_AT_END = re.compile(r"[^\w\s]*\Z")
_MARKS_AT_START = re.compile(r"[^\w\s,.;!?]*")

MIN_FORM_CHARS = 2
"""How many characters around an answer make a form that a prompt does not contain by chance."""


def write_in_form(view: TaskView, text: str, *, calls: bool) -> Turns:
    """Return the oracle's turns of another task, with *text* in place of the answer.

    The answer is what differs between the oracle's last turns of two tasks: in its last reply, and in the arguments of
    its last calls. A task with several answers gets *text* in the place of all of them.

    Args:
        view: The task, with the oracle's turns of this task and of another one.
        text: What to answer.
        calls: Whether the answer may be an argument of a tool.

    Returns:
        No turns if the answer is not found, or if *text* does not fit an argument.
    """
    own, other = _get_last_calls(view.own), _get_last_calls(view.other)
    replaces_calls = bool(other) and [item["name"] for item in own] == [item["name"] for item in other]
    if replaces_calls and not calls:
        return []
    filled: dict[int, Item] = {}
    if replaces_calls:
        for own_call, other_call in zip(own, other, strict=True):
            arguments = _fill(parse_object(own_call["arguments"]), parse_object(other_call["arguments"]), text)
            filled[id(other_call)] = other_call | {"arguments": json.dumps(arguments)}
    reply = _fill_reply(get_last_reply(view.own), get_last_reply(view.other), text)
    turns = [[filled.get(id(item), item) for item in turn] for turn in view.other]
    if reply is not None:
        turns[-1] = [responses.build_message(reply, id="msg_0")]
    return turns if turns != view.other else []


def find_in_form(view: TaskView, text: str) -> list[str]:
    """Return the parts of *text* that have the form of the oracle's reply, and the arguments of calls in it."""
    own, other = get_last_reply(view.own), get_last_reply(view.other)
    found = []
    start, end = (part.strip() for part in _split_form(own, other))
    marks = _MARKS_AT_END.search(start), _MARKS_AT_START.search(end)
    for before, after in ((start, end), [mark[0] if mark else "" for mark in marks]):
        if len(before) + len(after) >= MIN_FORM_CHARS:
            # Without an end, the answer ends with its line.
            found += re.findall(rf"{re.escape(before)}\s*(.+?)\s*{re.escape(after) or '$'}", text, re.MULTILINE)
    for call in _get_last_calls(view.own):
        arguments = re.findall(rf"\b{re.escape(str(call['name']))}\s*\(\s*([^()\n]*)\)", text)
        found += [argument.strip("{} ").rpartition("=")[2].rpartition(":")[2].strip(" \"'") for argument in arguments]
    return [answer for answer in found if answer]


def _get_last_calls(turns: Turns) -> list[Item]:
    called = [[item for item in turn if item.get("type") == "function_call"] for turn in turns]
    return next((items for items in reversed(called) if items), [])


def get_last_reply(turns: Turns) -> str:
    """Return the text of the last turn, empty if it has none."""
    items = turns[-1] if turns else []
    return "".join(extract_text(item.get("content")) for item in items if item.get("type") == "message")


def _fill_reply(own: str, other: str, text: str) -> str | None:
    """Return the reply *other* with *text* where it differs from *own*; `None` if the two are equal."""
    if own == other or not other:
        return None
    own_fields, other_fields = parse_object(own), parse_object(other)
    if own_fields and other_fields:
        return json.dumps(_fill(own_fields, other_fields, text))
    start, end = _split_form(own, other)
    lines = _count_equal_last_lines(own, other)
    before = other.split("\n")[: -1 - lines]
    after = other.split("\n")[len(before) + 1 :]
    return "\n".join([*before, f"{start}{text}{end}", *after])


def _split_form(own: str, other: str) -> tuple[str, str]:
    """Return what stands before and after the answer in the last line in which two replies differ."""
    if own == other:
        return "", ""
    lines = _count_equal_last_lines(own, other)
    own_line, other_line = own.split("\n")[-1 - lines :][0], other.split("\n")[-1 - lines :][0]
    shortest = min(len(own_line), len(other_line))
    same = next((place for place in range(shortest) if own_line[place] != other_line[place]), shortest)
    start = _WORD_END.sub("", other_line[:same]) if same else ""
    own_rest, other_rest = own_line[len(start) :], other_line[len(start) :]
    shortest = min(len(own_rest), len(other_rest))
    same = next((place for place in range(shortest) if own_rest[-1 - place] != other_rest[-1 - place]), shortest)
    end = _WORD_START.sub("", other_rest[len(other_rest) - same :], count=1) if same else ""
    return start, end


def _count_equal_last_lines(own: str, other: str) -> int:
    own_lines, other_lines = own.split("\n"), other.split("\n")
    shortest = min(len(own_lines), len(other_lines)) - 1
    return next((place for place in range(shortest) if own_lines[-1 - place] != other_lines[-1 - place]), shortest)


def _fill(own: Any, other: Any, text: str) -> Any:
    """Return *other* with *text* in place of each scalar in which it differs from *own*."""
    if isinstance(other, dict):
        own_fields = own if isinstance(own, dict) else {}
        return {key: _fill(own_fields.get(key), value, text) for key, value in other.items()}
    if isinstance(other, list):
        items = own if isinstance(own, list) else []
        return [_fill(items[place] if place < len(items) else None, value, text) for place, value in enumerate(other)]
    return other if own == other else _convert(other, text)


def _convert(example: object, text: str) -> object:
    """Return *text* as a value of the type of *example* if it is one."""
    if isinstance(example, (int, float)) and not isinstance(example, bool):
        try:
            return int(text) if isinstance(example, int) else float(text)
        except ValueError:
            return text
    return text
