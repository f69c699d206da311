"""Describe inbound APIs: validate their requests, write their server-sent events, detect servers without tools."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from gymsdk.errors import Failed, GymsdkError
from gymsdk.jsonl import dump_json
from gymsdk.types import Item, extract_text, is_reply

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}
"""The `type` of an OpenAI error by HTTP status; others are `server_error` or `invalid_request_error`."""

VLLM_TOOL_FLAGS = "--enable-auto-tool-choice --tool-call-parser hermes"
"""The flags with which vLLM parses the tool calls of most models; other models need another parser."""

TOOL_CALL_START, TOOL_CALL_END = "<tool_call>", "</tool_call>"

# Error messages of vLLM, SGLang, llama.cpp (current, and before it supported tools) and Ollama.
_TOOL_FIXES = (
    (r"requires --enable-auto-tool-choice|requires --tool-call-parser", f"start vLLM with {VLLM_TOOL_FLAGS}"),
    (r"Unsupported tool_call_parser: None", "start SGLang with --tool-call-parser qwen25, or the parser of the model"),
    (r"tools param requires --jinja|Unsupported param: tools\b", "start llama-server with --jinja"),
    (
        r"does not support tools\b",
        "serve a model with a chat template for tools (`ollama show NAME` lists its capabilities)",
    ),
)
_CODE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`", re.DOTALL)


class InvalidRequest(GymsdkError):
    """The body of a request is invalid; *param* names the wrong field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class ApiError:
    """An error response: HTTP *status*, *message*, a *code* for programs, and the *param* of the request at fault."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class InboundApi:
    """An API that a server offers, translated to and from Responses.

    Attributes:
        path: The path below `/v1/`.
        parse_request: Returns the Responses request for a body, without streaming options. Raises `InvalidRequest`.
        build_answer: Returns the answer for a Response and the body of the request.
        stream_events: Yields all server-sent events for an answer and the body of the request, as encoded frames.
        build_error: Returns the body of an error response.
        build_error_frames: Returns the last frames of a stream that fails after it has started.
        heartbeat: A frame that clients ignore, to keep the connection open.
        format_overflow: Returns the message of the error for a prompt that is too long, from that of the engine.
        refuses_overflow: Whether a prompt that is too long is an error unless the server is configured otherwise. The
            programs that use Messages summarize the conversation after this error only.
        continues_last_turn: Whether a turn of the policy at the end of a conversation is the beginning of the answer.
        count_answers: Returns for how many answers the body of a request asks. Raises `InvalidRequest`.
        join_answers: Returns one answer for those of several calls.
        echoes_token_ids: Whether a captured call returns its token ids without being asked. Our own agents need them;
            other programs send them back with each later request.
    """

    path: str
    parse_request: Callable[[Item], Item]
    build_answer: Callable[[Item, Item], Item]
    stream_events: Callable[[Item, Item], Iterator[bytes]]
    build_error: Callable[[ApiError], Item]
    build_error_frames: Callable[[ApiError], bytes]
    heartbeat: bytes
    format_overflow: Callable[[str], str] = str
    refuses_overflow: bool = False
    continues_last_turn: bool = False
    echoes_token_ids: bool = False
    count_answers: Callable[[Item], int] = lambda _: 1
    join_answers: Callable[[list[Item]], Item] = itemgetter(0)


def build_error(error: ApiError) -> Item:
    """Return the body of *error* in the format of the OpenAI API."""
    default = "server_error" if error.status >= 500 else "invalid_request_error"  # noqa: PLR2004 - HTTP server errors
    kind = ERROR_TYPES.get(error.status, default)
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def get_text(body: Item, key: str, where: str = "") -> str:
    """Return the string under *key* of *body*; *where* is the path of *body* in the request.

    Raises:
        InvalidRequest: The value is not a string.
    """
    value = body.get(key)
    if isinstance(value, str):
        return value
    raise build_invalid_field(_join_path(where, key), "a string")


def get_object(body: Item, key: str, where: str = "") -> Item:
    """Return the object under *key* of *body*, empty if it is missing or null.

    Raises:
        InvalidRequest: The value is not an object.
    """
    value = body.get(key)
    if value is None:
        return {}
    if isinstance(value, dict):
        return value
    raise build_invalid_field(_join_path(where, key), "an object")


def get_integer(body: Item, key: str, where: str = "") -> int | None:
    """Return the integer under *key* of *body*, `None` if it is missing or null.

    Raises:
        InvalidRequest: The value is not an integer.
    """
    value = body.get(key)
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise build_invalid_field(_join_path(where, key), "an integer")


def check_objects(value: Any, where: str) -> list[Item]:
    """Return *value*, the field at the path *where*, if it is a list of objects.

    Raises:
        InvalidRequest: The value is not a list of objects.
    """
    if not isinstance(value, list):
        raise build_invalid_field(where, "a list")
    for number, element in enumerate(value):
        if not isinstance(element, dict):
            raise build_invalid_field(f"{where}.{number}", "an object")
    return value


def build_invalid_field(where: str, expected: str) -> InvalidRequest:
    """Return the error for a field at the path *where* that is not as *expected*."""
    return InvalidRequest(f"{where} must be {expected}", param=where)


def _join_path(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def suggest_tool_fix(text: str) -> str | None:
    """Return how to start the server that rejected tools with the error *text*, `None` for any other error."""
    return next((advice for pattern, advice in _TOOL_FIXES if re.search(pattern, text, re.IGNORECASE)), None)


def check_unparsed_calls(response: Item, request: Item, *, host: str) -> None:
    """Raise an error if the server left valid tool calls in the text of *response* instead of parsing them.

    A malformed call, or a call of a tool that *request* does not offer, is the policy's mistake and stays text.

    Raises:
        Failed: The server at *host* runs without a parser for tool calls.
    """
    offered = {tool.get("name") for tool in request.get("tools") or [] if isinstance(tool, dict)}
    if not offered or request.get("tool_choice") == "none" or response.get("status") == "incomplete":
        return
    output = response["output"]
    if any(item.get("type") == "function_call" for item in output):
        return
    text = "".join(extract_text(item.get("content")) for item in output if is_reply(item))
    # Without code: a reply may quote a call.
    if TOOL_CALL_START in text and _has_only_valid_calls(_CODE.sub("", text), offered):
        raise Failed(
            f"{host} leaves tool calls in the text, as in {text[:120]!r}; start vLLM with {VLLM_TOOL_FLAGS},"
            " or the parser of the model",
            kind="model_misconfigured",
        )


def _has_only_valid_calls(text: str, offered: Collection[object]) -> bool:
    """Whether *text* has tool calls and all are valid: parsers leave all calls in the text if one is invalid."""
    calls = list(_find_calls(text))
    return bool(calls) and all(_is_valid_call(call, offered) for call in calls)


def _find_calls(text: str) -> Iterator[str]:
    """Yield the content of each call in *text*, empty for a call without a closing tag."""
    position = 0
    while (start := text.find(TOOL_CALL_START, position)) >= 0:
        end = text.find(TOOL_CALL_END, start)
        position = len(text) if end < 0 else end
        yield text[start + len(TOOL_CALL_START) : position] if end >= 0 else ""


def _is_valid_call(call: str, offered: Collection[object]) -> bool:
    try:
        parsed = json.loads(call)
    except (ValueError, RecursionError):
        return False
    if not isinstance(parsed, dict) or not isinstance(parsed.get("arguments"), dict):
        return False
    return isinstance(parsed.get("name"), str) and parsed["name"] in offered


HEARTBEAT_FRAME = b": beat\n\n"
"""A comment, which clients do not treat as an event."""

DONE_FRAME = b"data: [DONE]\n\n"

# JSON escapes the line breaks of ASCII. Clients that split a stream as text also break lines at these characters.
_LINE_BREAKS = {"\x85".encode(): b"\\u0085", "\u2028".encode(): b"\\u2028", "\u2029".encode(): b"\\u2029"}


def dump_line(value: object) -> bytes:
    """Return *value* as JSON without any character that a client may treat as a line break."""
    data = dump_json(value)
    if not data.isascii():
        for character, escape in _LINE_BREAKS.items():
            data = data.replace(character, escape)
    return data


def build_frame(data: bytes, event: str = "") -> bytes:
    """Return the frame of an event with one line of *data*, and the name of the *event* if it has one."""
    return b"event: %s\ndata: %s\n\n" % (event.encode(), data) if event else b"data: %s\n\n" % data


def build_error_frames(error: ApiError) -> bytes:
    """Return the last frames of a stream of chunks that fails."""
    return build_frame(dump_line(build_error(error))) + DONE_FRAME


def splice_json(body: Item, encoded: dict[str, bytes]) -> bytes:
    """Return *body* as JSON, with the values of the keys in *encoded* replaced by that JSON."""
    if not encoded:
        return dump_line(body)
    head = dump_line({key: value for key, value in body.items() if key not in encoded})
    tail = b",".join(b'"%s":%s' % (key.encode(), value) for key, value in encoded.items())
    return b"{%s}" % tail if head == b"{}" else b"%s,%s}" % (head[:-1], tail)


def join_json_list(encoded: list[bytes]) -> bytes:
    """Return the JSON list of values that are already JSON."""
    return b"[%s]" % b",".join(encoded)
