"""Turns: the messages of a chat as the items of a Responses request."""

from __future__ import annotations

from collections.abc import Iterator

from gymsdk import wire
from gymsdk.convert import parts
from gymsdk.convert.tokens import CARRIED
from gymsdk.transcript import Item

from .face import Malformed

UNREADABLE = (LookupError, TypeError, AttributeError, ValueError)
"""What comes of reading a message that is none."""


def items(message: Item) -> list[Item]:
    """Give the items that a chat *message* amounts to; raises `Malformed`.

    An assistant's are its thoughts, its text and its calls. A `<think>` in its text stays text: whether earlier
    thoughts are shown again is the chat template's business, and to take them out would change what it is given.
    """
    if not isinstance(message.get("role"), str):
        raise Malformed("each of 'messages' must have a role", "messages")
    if message["role"] == "function" or message.get("function_call"):
        raise Malformed(
            "'function_call' is no longer spoken; send 'tool_calls', and answers as role 'tool'", "messages"
        )
    try:
        return list(_items(message))
    except UNREADABLE as error:
        raise Malformed(f"a message of role {message['role']!r} is malformed: {error!r}", "messages") from error


def _items(message: Item) -> Iterator[Item]:
    role = message["role"]
    if role == "tool":
        output = parts.from_chat(message.get("content"))
        yield {"type": "function_call_output", "call_id": message.get("tool_call_id"), "output": output}
    elif role == "assistant":
        yield from _turn(message)
    else:
        yield {"role": role, "content": parts.from_chat(message.get("content"))}


def _turn(message: Item) -> Iterator[Item]:
    said = list(_said(message))
    if said:
        said[-1] |= {key: message[key] for key in CARRIED if message.get(key)}
    yield from said


def _said(message: Item) -> Iterator[Item]:
    thought, calls = message.get("reasoning_content") or message.get("reasoning"), message.get("tool_calls") or []
    if thought:
        if not isinstance(thought, str):
            raise TypeError("its reasoning is no text")
        yield wire.reasoning(thought)
    if content := _written(message):
        yield wire.message("") | {"content": content}
    elif not (thought or calls):
        yield wire.message("")
    for call in calls:
        function = call["function"]
        yield wire.function_call(function["name"], function.get("arguments") or "{}", call.get("id"))


def _written(message: Item) -> list[Item]:
    """The parts of what an assistant wrote, refusals among them."""
    content = message.get("content") or []
    given = [{"type": "text", "text": content}] if isinstance(content, str) else content
    refusal = message.get("refusal")
    told = [*given, {"type": "refusal", "refusal": refusal}] if refusal else given
    found = parts.from_chat(told, written=True)
    assert isinstance(found, list), "a list becomes a list"
    return [part | {"annotations": []} if part["type"] == "output_text" else part for part in found]
