"""Chat Completions as a server speaks it: a chat body becomes a Responses request, a Response a completion."""

from __future__ import annotations

from typing import Any

from gymsdk.convert.chat import LOGPROBS
from gymsdk.convert.keys import known
from gymsdk.transcript import Item, are_objects

from . import shape
from .chunks import broken, events
from .completions import answer, completion, usage
from .errors import error
from .face import Face, Malformed
from .sse import BEAT
from .turns import items

__all__ = ["FACE", "completion", "items", "request", "tools", "usage"]

SAME = frozenset(
    {
        "metadata",
        "model",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "temperature",
        "top_logprobs",
        "top_p",
        "user",
    }
)
"""What has one name in both APIs."""

OTHER = frozenset(
    {
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "messages",
        "n",
        "reasoning_effort",
        "response_format",
        "stream",
        "stream_options",
        "tool_choice",
        "tools",
        "verbosity",
    }
)
KNOWN = SAME | OTHER
OLD = ("functions", "function_call")


def request(body: Item) -> Item:
    """Give the Responses request that asks what a chat *body* asks; raises `Malformed`."""
    messages = body.get("messages")
    if not are_objects(messages):
        raise Malformed("'messages' must be a list of messages, each with a role", "messages")
    for key in ("metadata", "response_format", "stream_options"):
        shape.object_(body, key)
    if body.get("n") not in (None, 1):
        raise Malformed("this server gives one answer at a time; leave 'n' out", "n")
    if old := [key for key in OLD if body.get(key)]:
        raise Malformed(f"{old[0]!r} is no longer spoken; send 'tools' and 'tool_choice'", old[0])
    kept = {
        key: value
        for key, value in known(body, KNOWN, where="Chat Completions").items()
        if value is not None and key not in OTHER
    }
    told = _told(body)
    given = [item for message in messages for item in items(message)]
    return kept | {key: value for key, value in told.items() if value is not None} | {"input": given}


def tools(offered: object) -> list[Item]:
    """Give the tools *offered* in a chat body as a Responses request has them; raises `Malformed`."""
    if not are_objects(offered):
        raise Malformed("'tools' must be a list of tools", "tools")
    return [_tool(tool, number) for number, tool in enumerate(offered)]


def _told(body: Item) -> Item:
    """What a Responses request has under other names, or in another form."""
    limit, effort = body.get("max_completion_tokens"), body.get("reasoning_effort")
    return {
        "max_output_tokens": body.get("max_tokens") if limit is None else limit,
        "reasoning": {"effort": effort} if effort else None,
        "text": _text(body),
        "tools": tools(body["tools"]) if body.get("tools") else None,
        "tool_choice": _choice(body.get("tool_choice")),
        "include": [LOGPROBS] if body.get("logprobs") else None,
    }


def _text(body: Item) -> Item | None:
    form = _flat(body.get("response_format"))
    if form and not isinstance(form.get("type"), str):
        raise Malformed("'response_format' must have a type", "response_format")
    text = {"format": form or None, "verbosity": body.get("verbosity")}
    return {key: value for key, value in text.items() if value is not None} or None


def _tool(tool: Item, number: int) -> Item:
    flat: Item = _flat(tool)
    if not isinstance(flat.get("name"), str):
        raise Malformed(f"tools[{number}] is no function with a name", "tools")
    return flat


def _choice(choice: Any) -> Any:
    flat = _flat(choice) if isinstance(choice, dict) else choice
    if isinstance(flat, dict) and flat.get("type") == "allowed_tools":
        allowed = flat.get("tools")
        if not are_objects(allowed):
            raise Malformed("'tool_choice' must list the tools that are allowed", "tool_choice")
        return flat | {"tools": [_flat(tool) for tool in allowed]}
    return flat


def _flat(nested: Any) -> Any:
    """Give `{"type": "x", "x": {…}}` without its inner level, and anything else as it is."""
    kind = nested.get("type") if isinstance(nested, dict) else None
    inner = nested.get(kind) if isinstance(kind, str) else None
    return {"type": kind, **inner} if isinstance(inner, dict) else nested


FACE = Face(
    path="chat/completions",
    parse_request=request,
    build_answer=answer,
    stream_events=events,
    build_error=error,
    build_error_frames=broken,
    heartbeat=BEAT,
)
