"""Misfits: servers whose answers show that they were started, or are asked, in a way that cannot work."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from gymsdk.errors import Failed
from gymsdk.types import Item, extract_text, is_reply


class InvalidRequest(Exception):
    """A body is no request of its API; *param* is what is wrong with it."""

    def __init__(self, sentence: str, param: str | None = None) -> None:
        super().__init__(sentence)
        self.param = param


@dataclass(frozen=True, slots=True)
class ApiError:
    """Why there is no answer: the *status* of HTTP, a *sentence*, a *code* for programs, the *param* that is wrong."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class InboundApi:
    """An API at `/v1/` and *path*.

    *request* gives the Responses request that a body asks for, or raises `Malformed`; it leaves out what asks for a
    stream. *answer* gives the body that a Response amounts to for the body that asked. *events* gives that answer as
    the frames of a stream of server-sent events, ready to be sent, the last one included; *error* is the body, and
    *broken* the last frames of a stream that has begun, where there is no answer. *beat* is a frame that says nothing.
    """

    path: str
    parse_request: Callable[[Item], Item]
    build_answer: Callable[[Item, Item], Item]
    stream_events: Callable[[Item, Item], Iterator[bytes]]
    build_error: Callable[[ApiError], Item]
    build_error_frames: Callable[[ApiError], bytes]
    heartbeat: bytes


def get_text(body: Item, key: str, where: str = "") -> str:
    """Give the string at *key* of *body*, which stands at *where*."""
    value = body.get(key)
    if isinstance(value, str):
        return value
    raise build_invalid_field(_path(where, key), "a string")


def get_object(body: Item, key: str, where: str = "") -> Item:
    """Give the object at *key* of *body*, an empty one where there is none."""
    value = body.get(key)
    if value is None:
        return {}
    if isinstance(value, dict):
        return value
    raise build_invalid_field(_path(where, key), "an object")


def check_objects(value: Any, where: str) -> list[Item]:
    """Give the list of objects that *value*, at *where*, must be."""
    if not isinstance(value, list):
        raise build_invalid_field(where, "a list")
    for number, each in enumerate(value):
        if not isinstance(each, dict):
            raise build_invalid_field(f"{where}.{number}", "an object")
    return value


def build_invalid_field(where: str, what: str) -> InvalidRequest:
    """The refusal of something at *where* that must be *what*."""
    return InvalidRequest(f"{where} must be {what}", param=where)


def _path(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}


def build_error(trouble: ApiError) -> Item:
    """Give the body that tells of *trouble*."""
    kind = ERROR_TYPES.get(trouble.status, "server_error" if trouble.status >= 500 else "invalid_request_error")  # noqa: PLR2004 - where HTTP's own server errors begin
    return {"error": {"message": trouble.message, "type": kind, "param": trouble.param, "code": trouble.code}}


VLLM_TOOL_FLAGS = "--enable-auto-tool-choice --tool-call-parser hermes"
"""How vLLM is told to read the tool calls of most models; others have a parser of their own."""

TOOL_CALL_START, TOOL_CALL_END = "<tool_call>", "</tool_call>"

# The words of vLLM, SGLang, llama.cpp (of today and before it had tools) and Ollama.
_MENDED = (
    (r"requires --enable-auto-tool-choice|requires --tool-call-parser", f"start vLLM with {VLLM_TOOL_FLAGS}"),
    (r"Unsupported tool_call_parser: None", "start SGLang with --tool-call-parser qwen25, or the parser of the model"),
    (r"tools param requires --jinja|Unsupported param: tools\b", "start llama-server with --jinja"),
    (
        r"does not support tools\b",
        "serve a model whose template knows tools (`ollama show NAME` lists its capabilities)",
    ),
)
_CODE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`", re.DOTALL)


def suggest_tool_fix(text: str) -> str | None:
    """Give how to mend a server that refuses tools in *text*; `None` where it says nothing of the kind."""
    return next((advice for words, advice in _MENDED if re.search(words, text, re.IGNORECASE)), None)


def check_unparsed_calls(response: Item, request: Item, *, host: str) -> None:
    """Raise `Failed` where the text of a *response* holds tool calls that *host* should have read.

    A malformed call is the policy's own doing, and so is one of a tool that was not offered: they are text.
    """
    offered = {tool.get("name") for tool in request.get("tools") or [] if isinstance(tool, dict)}
    if not offered or request.get("tool_choice") == "none" or response.get("status") == "incomplete":
        return
    output = response["output"]
    if any(item.get("type") == "function_call" for item in output):
        return
    text = "".join(extract_text(item.get("content")) for item in output if is_reply(item))
    if TOOL_CALL_START in text and _left(_CODE.sub("", text), offered):
        message = f"{host} leaves tool calls in the text, as in {text[:120]!r}; start vLLM with {VLLM_TOOL_FLAGS}"
        raise Failed(f"{message}, or the parser of the model", kind="model_misconfigured")


def _left(text: str, offered: Collection[object]) -> bool:
    """Whether *text* holds tool calls, and all of them are sound: of a bad one among them a parser leaves all."""
    calls = list(_calls(text))
    return bool(calls) and all(_is_sound(call, offered) for call in calls)


def _calls(text: str) -> Iterator[str]:
    """What stands in each call of *text*; nothing in one that is not closed."""
    here = 0
    while (start := text.find(TOOL_CALL_START, here)) >= 0:
        end = text.find(TOOL_CALL_END, start)
        here = len(text) if end < 0 else end
        yield text[start + len(TOOL_CALL_START) : here] if end >= 0 else ""


def _is_sound(call: str, offered: Collection[object]) -> bool:
    try:
        parsed = json.loads(call)
    except (ValueError, RecursionError):
        return False
    if not isinstance(parsed, dict) or not isinstance(parsed.get("arguments"), dict):
        return False
    return isinstance(parsed.get("name"), str) and parsed["name"] in offered
