"""Responses as a server speaks it: a request checked where it is read, a Response made whole for its clients."""

from __future__ import annotations

from gymsdk import responses, usage, wire
from gymsdk.convert.keys import RESPONSES, known
from gymsdk.transcript import Item, are_objects

from . import shape
from .errors import error
from .face import Face, Malformed
from .happenings import broken, events
from .sse import BEAT

OBJECTS = ("metadata", "reasoning", "stream_options", "text")
TRANSPORT = ("stream", "stream_options")
MADE = frozenset({"created_at", "id", "model", "object", "parallel_tool_calls", "status", "tool_choice", "tools"})
SAID = {"reasoning": "summary", "function_call_output": "output"}
PREFIXES = {"message": "msg", "function_call": "fc", "reasoning": "rs"}


def request(body: Item) -> Item:
    """Give the Responses request in *body*; raises `Malformed`."""
    given = body.get("input")
    if not isinstance(given, str) and not _are_items(given):
        raise Malformed("'input' must be a string or a list of items", "input")
    if body.get("tools") is not None and not are_objects(body["tools"]):
        raise Malformed("'tools' must be a list of tools", "tools")
    if not isinstance(body.get("instructions"), str | None):
        raise Malformed("'instructions' must be a string", "instructions")
    if not isinstance(body.get("include"), list | None):
        raise Malformed("'include' must be a list", "include")
    for key in OBJECTS:
        shape.object_(body, key)
    if form := shape.object_(shape.object_(body, "text"), "format", "text"):
        shape.text(form, "type", "text.format")
    if body.get("background"):
        raise Malformed("this server answers while its client waits; leave 'background' out", "background")
    return {key: value for key, value in known(body, RESPONSES, where="Responses").items() if key not in TRANSPORT}


def answer(response: Item, asked: Item) -> Item:
    """Give *response* with all that OpenAI's types ask for: ids, types, and numbers where a count is not known."""
    if not response.keys() >= MADE:
        response = wire.response([], model=str(asked.get("model") or ""), request=asked) | response
    return usage.whole(response | {"output": [_whole(item) for item in response["output"]]})


def _whole(item: Item) -> Item:
    kind, content = item.get("type") or "message", item.get("content")
    if item.get("id") and item.get("type") and not isinstance(content, str):
        return item
    made = {"id": item.get("id") or wire.fresh(PREFIXES.get(kind, kind)), "type": kind}
    if isinstance(content, str):
        made["content"] = [{"type": "output_text", "text": content, "annotations": []}]
    return item | made


def _are_items(value: object) -> bool:
    return isinstance(value, list) and responses.is_response({"output": value}) and all(map(_is_said, value))


def _is_said(item: Item) -> bool:
    """Whether *item* says in a form that is read what it is there to say."""
    key = SAID.get(item.get("type", "message"))
    told = item.get(key) if key else None
    return told is None or are_objects(told) or (key == "output" and isinstance(told, str))


FACE = Face(
    path="responses",
    parse_request=request,
    build_answer=answer,
    stream_events=events,
    build_error=error,
    build_error_frames=broken,
    heartbeat=BEAT,
)
