"""What is said in an episode: messages, tool calls, and the transcript they make.

Items are objects of the OpenAI Responses API, kept as plain JSON from end to end
(https://platform.openai.com/docs/api-reference/responses).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias, TypeGuard

from pydantic import BaseModel, BeforeValidator, ConfigDict

Item: TypeAlias = dict[str, Any]
"""One Responses item, part or body: a JSON object."""


Content: TypeAlias = str | list[Item]
"""Text, or a list of content parts (images are parts)."""


Ended: TypeAlias = Literal["done", "turns", "tools", "tokens", "deadline"]
"""Why an episode ended: by itself, or because a budget ran out."""


class Message(BaseModel):
    """A chat message: as an action it is the policy's plain reply, in a reset or step what it sees next."""

    model_config = ConfigDict(frozen=True)

    role: Literal["user", "assistant", "system", "developer"] = "assistant"
    content: Content

    @property
    def text(self) -> str:
        """The message's text, its parts joined."""
        return text_of(self.content)

    def item(self) -> Item:
        """Give the message as an input item."""
        return {"type": "message", "role": self.role, "content": self.content}


def _as_json(arguments: object) -> object:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, Mapping) else arguments


class ToolCall(BaseModel):
    """A policy's call of one tool, its arguments verbatim as JSON text (a mapping is written as JSON)."""

    model_config = ConfigDict(frozen=True)

    name: str
    arguments: Annotated[str, BeforeValidator(_as_json)] = "{}"
    call_id: str = ""

    def parsed(self) -> dict[str, Any] | None:
        """Give the arguments as a dict, or `None` where they are not a JSON object."""
        try:
            value = json.loads(self.arguments)
        except (ValueError, RecursionError):
            return None
        return value if isinstance(value, dict) else None


Action: TypeAlias = Message | ToolCall
"""What a policy does: a plain reply, or one tool call."""


def text_of(content: Content | None) -> str:
    """Give the text in *content*: a string itself, or the text of its parts joined."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(text for part in content if isinstance(text := part.get("text"), str))


def are_objects(value: object) -> TypeGuard[list[Item]]:
    """Whether *value* is a list of JSON objects."""
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)


def is_content(value: object) -> TypeGuard[Content | None]:
    """Return whether *value* can be the content of a message: text, a list of parts, or nothing."""
    return value is None or isinstance(value, str) or are_objects(value)


def is_reply(item: Item) -> bool:
    """Whether *item* is a message of the policy."""
    return item.get("role") == "assistant" and item.get("type", "message") == "message"


@dataclass(slots=True)
class Transcript:
    """What was said: the *opening* the policy was shown, then its own *items* and the environment's answers."""

    opening: list[Item] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)
    ended: Ended | None = None

    @property
    def reply(self) -> str:
        """The text of the policy's last turn where that turn called no tool, else an empty string."""
        parts: list[str] = []
        for item in reversed(self.items):
            kind = item.get("type", "message")
            if kind == "function_call":
                return ""
            if is_reply(item):
                parts.append(text_of(item.get("content")))
            elif kind != "reasoning" and (parts or kind != "message"):
                break
        return "".join(reversed(parts))

    def text(self) -> str:
        """Give every text the policy wrote, reasoning excluded, joined without a separator."""
        return "".join(text_of(item.get("content")) for item in self.items if is_reply(item))

    def calls(self, name: str | None = None) -> list[ToolCall]:
        """Give the tool calls in order, all or those of one *name*."""
        return [call for call in tool_calls(self.items) if name is None or call.name == name]

    def output(self, call_id: str) -> str | None:
        """Give the text that answered the call with this id, or `None` where none did."""
        for item in self.items:
            if item.get("type") == "function_call_output" and item.get("call_id") == call_id:
                return text_of(item.get("output"))
        return None


def tool_calls(items: Iterable[Item]) -> Iterator[ToolCall]:
    """Yield the function calls among *items*."""
    for item in items:
        if item.get("type") == "function_call":
            arguments = item.get("arguments")
            yield ToolCall(
                name=str(item.get("name", "")),
                arguments=arguments if isinstance(arguments, str) else json.dumps(arguments),
                call_id=str(item.get("call_id", "")),
            )
