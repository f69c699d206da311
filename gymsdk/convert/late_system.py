"""Send late system messages as user messages, for chat templates that allow a system message at the start only."""

from __future__ import annotations

import re
from typing import Any

from gymsdk.types import Content, Item

SYSTEM_ROLES = frozenset({"system", "developer"})

# What chat templates and engines write about a role at the wrong place.
_ROLE_REFUSAL = re.compile(
    r"system.?(message|role|prompt|instruction)|\brole|alternat(e|ing)\b|template|jinja", re.IGNORECASE
)


def is_role_refusal(message: str) -> bool:
    """Whether the *message* of a refusal may be about the role of a message."""
    return bool(_ROLE_REFUSAL.search(message))


def has_late_system(body: Item) -> bool:
    """Whether the *body* of a request to an engine has a system message after another message."""
    messages = _get_messages(body)
    first = next((index for index, message in enumerate(messages) if not _is_system(message)), len(messages))
    return any(map(_is_system, messages[first:]))


def move_late_system(body: Item) -> Item:
    """Return the *body* of a request to an engine with its late system messages as user messages."""
    if "messages" in body:
        return body | {"messages": merge_late_system(body["messages"])}
    items = _get_messages(body)
    first = next((index for index, item in enumerate(items) if not _is_system(item)), len(items))
    late = [item | {"role": "user"} if _is_system(item) else item for item in items[first:]]
    return body | {"input": [*items[:first], *late]}


def merge_late_system(messages: list[Item], *, is_start: bool = True) -> list[Item]:
    """Return chat *messages* in which a late system message is part of the user message beside it, or is one.

    Templates that refuse late system messages often refuse two user messages in a row, too.

    Args:
        messages: The messages.
        is_start: Whether they begin the conversation, so that the first one may be a system message.
    """
    merged: list[Item] = []
    was_moved = False
    for index, message in enumerate(messages):
        is_moved = _is_system(message) and not (is_start and index == 0)
        current = message | {"role": "user"} if is_moved else message
        if merged and (is_moved or was_moved) and current.get("role") == merged[-1].get("role") == "user":
            merged[-1] = merged[-1] | {"content": _join(merged[-1].get("content"), current.get("content"))}
        else:
            merged.append(current)
            was_moved = False
        was_moved = was_moved or is_moved
    return merged


def _join(first: Content | None, second: Content | None) -> Content:
    if isinstance(first, list) or isinstance(second, list):
        return [*_to_parts(first), *_to_parts(second)]
    return "\n\n".join(filter(None, (first, second)))


def _to_parts(content: Content | None) -> list[Item]:
    return content if isinstance(content, list) else [{"type": "text", "text": content or ""}]


def _is_system(message: Item) -> bool:
    return message.get("role") in SYSTEM_ROLES


def _get_messages(body: Item) -> list[Any]:
    messages = body.get("messages") or body.get("input")
    return messages if isinstance(messages, list) else []
