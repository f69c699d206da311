"""The bodies on the wire: Response objects and the items in them, as plain JSON objects."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeAlias
from uuid import uuid4

from gymsdk.transcript import Item

Status: TypeAlias = Literal["completed", "incomplete", "failed"]
"""How a Response ended."""

Api: TypeAlias = Literal["chat", "responses"]
"""The two forms of the OpenAI API."""

Thoughts: TypeAlias = Literal["field", "tags", "drop"]
"""How earlier reasoning goes back to a chat model: a field of its own, `<think>` text, or not at all.

A model asked in Responses is shown its items, or where they are to be dropped none but its own.
"""

ENDED = (None, "completed", "incomplete")
"""How an answer says that it is one; an engine that gave it up, or still works at it, says otherwise."""

TOKENS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
"""What an item of a training model carries of its tokens: all three, or none."""

ECHOED = (
    "instructions",
    "max_output_tokens",
    "metadata",
    "previous_response_id",
    "reasoning",
    "service_tier",
    "temperature",
    "text",
    "top_logprobs",
    "top_p",
    "truncation",
    "user",
)
"""What a Response repeats of its request where the request has it."""


def fresh(prefix: str) -> str:
    """A new id: *prefix*, an underscore, 32 hexadecimal digits."""
    return f"{prefix}_{uuid4().hex}"


def message(text: str, *, id: str | None = None) -> Item:
    """The policy's reply *text* as an output item."""
    return {
        "id": id or fresh("msg"),
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": text, "annotations": []}],
    }


def function_call(
    name: str, arguments: str | Mapping[str, Any], call_id: str | None = None, *, id: str | None = None
) -> Item:
    """A call of the tool *name* as an output item, its arguments verbatim where they are text."""
    return {
        "id": id or fresh("fc"),
        "type": "function_call",
        "call_id": call_id or fresh("call"),
        "name": name,
        "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False),
        "status": "completed",
    }


def function_call_output(call_id: str, output: str | list[Item]) -> Item:
    """The answer to the call *call_id* as an input item."""
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def reasoning(*texts: str, id: str | None = None) -> Item:
    """The policy's thoughts as one output item, a summary part for each text."""
    summary = [{"type": "summary_text", "text": text} for text in texts]
    return {"id": id or fresh("rs"), "type": "reasoning", "status": "completed", "summary": summary}


def is_ended(response: Item) -> bool:
    """Whether *response* is an answer: one that was aborted, or is yet to come, is none."""
    return response.get("status") in ENDED


def usage(
    input_tokens: int = 0,
    output_tokens: int = 0,
    *,
    cached_tokens: int | None = None,
    reasoning_tokens: int | None = None,
) -> Item:
    """The usage of one call; a detail is null where the provider did not report it."""
    return {
        "input_tokens": input_tokens,
        "input_tokens_details": {"cached_tokens": cached_tokens},
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": input_tokens + output_tokens,
    }


def response(
    output: list[Item],
    *,
    model: str,
    usage: Item | None = None,
    status: Status = "completed",
    reason: str | None = None,
    request: Item | None = None,
    id: str | None = None,
) -> Item:
    """A whole Response object around *output*; *reason* says why it is incomplete, *request* is echoed."""
    asked = request or {}
    return {
        "id": id or fresh("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": reason} if reason else None,
        "output": output,
        "usage": usage,
        "parallel_tool_calls": _given(asked, "parallel_tool_calls", default=True),
        "tool_choice": _given(asked, "tool_choice", default="auto"),
        "tools": _given(asked, "tools", default=[]),
    } | {key: asked[key] for key in ECHOED if asked.get(key) is not None}


_OVERFLOW = re.compile(
    r"context.?(length|window|size|limit)|maximum (model|allowed) length|prompt is too long"
    r"|max_tokens must be at least 1, got -",
    re.IGNORECASE,
)
# What llama.cpp calls it, whatever its status.
_OVERFLOWN = "exceed_context_size_error"
# Servers that check a request with pydantic quote it after these words.
_QUOTING = re.compile(r"""['"]input['"]\s*:|input_value\s*=""")
_ROOM = re.compile(r"maximum context length (?:is|of) (\d+)", re.IGNORECASE)
_REQUESTED = re.compile(
    r"too large: (\d+)|requested (\d+) output tokens|(\d+) (?:tokens for|in) the completion", re.IGNORECASE
)


def overflowed(status: int, body: bytes) -> bool:
    """Whether a server's refusal says that the prompt does not fit its model's context.

    Where the answer alone was to be longer than the context no prompt fits: that is a wrong request.
    """
    if status < 400:  # noqa: PLR2004 - what HTTP calls an error
        return False
    error = _error(body)
    if status not in {400, 413, 422}:
        return error is not None and _type(error) == _OVERFLOWN
    said = list(_said(error)) if error is not None else []
    return any(map(_OVERFLOW.search, said)) and not any(map(_asks_too_much, said))


def _asks_too_much(words: str) -> bool:
    room, requested = _ROOM.search(words), _REQUESTED.search(words)
    if not room or not requested:
        return False
    return int(next(filter(None, requested.groups()))) >= int(room[1])


def _error(body: bytes) -> Item | None:
    try:
        refused = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return refused if isinstance(refused, dict) else None


def _type(refused: Item) -> object:
    error = refused.get("error")
    return error.get("type") if isinstance(error, dict) else None


def _said(refused: Item) -> Iterator[str]:
    """What a refusal says in the server's own words: what it repeats of the request is not among them."""
    error = refused.get("error")
    own = [error.get("message"), error.get("code")] if isinstance(error, dict) else [error]
    for words in (*own, refused.get("message"), refused.get("detail")):
        if isinstance(words, str):
            yield _QUOTING.split(words)[0]


def overflow(body: str, *, model: str, request: Item) -> Item:
    """The Response to a prompt that does not fit: incomplete and empty, with what the server said of it."""
    none = usage(cached_tokens=0, reasoning_tokens=0)
    empty = response([], model=model, usage=none, status="incomplete", request=request)
    return empty | {"incomplete_details": {"reason": "max_output_tokens", "message": body[:500]}}


def _given(request: Item, key: str, *, default: object) -> object:
    value = request.get(key)
    return default if value is None else value
