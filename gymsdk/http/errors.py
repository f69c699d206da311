"""Descriptions of failed HTTP requests: connection errors, broken-off responses and the messages of rejections."""

from __future__ import annotations

import errno
import os
import re
import socket
import ssl
from collections.abc import Iterator

import aiohttp
import orjson

from gymsdk.http.connections import InvalidResponse
from gymsdk.types import Item

MAX_EXCERPT_CHARS = 200
"""The maximum length of an excerpt from a text that is not a server's error message."""

MAX_SENTENCE_CHARS = 500
"""The maximum length of an excerpt from a server's error message."""

FAILURE_KINDS = {
    401: "model_unauthorized",
    403: "model_unauthorized",
    404: "model_not_found",
    429: "model_rate_limited",
}
"""The failure kinds for error statuses of a model server."""

_STATUS_HINTS = {
    401: "; check the API key",
    403: "; check the API key",
    404: "; check the base URL (it usually ends in /v1) and the model's name",
    407: "; write the user and the password into the variable of the proxy, as in http://USER:PASSWORD@HOST:PORT",
    429: "; lower the load, or wait",
}
_MIN_SERVER_ERROR = 500

_ERRNO_MESSAGES = {
    errno.ECONNREFUSED: "nothing listens there; is the server running?",
    errno.EHOSTUNREACH: "there is no route to that host; check the address",
    errno.ENETUNREACH: "there is no route to that network; check the address",
}


def get_status_hint(status: int) -> str:
    """Return advice for a response with this error *status*, to append to a message; empty if there is none."""
    return _STATUS_HINTS.get(status) or ("; check the server's log" if status >= _MIN_SERVER_ERROR else "")


def describe_connect_error(error: Exception) -> str:
    """Return why a connection could not be opened, and what to check."""
    cause = _find_os_error(error)
    if isinstance(cause, socket.gaierror):
        return "the host name cannot be resolved; check the name"
    if isinstance(cause, ssl.SSLError):
        return f"the TLS handshake failed ({_describe_error(cause)}); write http:// if the server does not use TLS"
    if isinstance(cause, TimeoutError):
        return "it accepted no connection in time; is the server running?"
    return _ERRNO_MESSAGES.get(_get_errno(cause) or 0, f"{_describe_error(cause)}; is the server running?")


def describe_interruption(error: Exception) -> str:
    """Return how a server's response broke off."""
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "the connection was closed before the response began; check the server's log"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "the connection was closed in the middle of the response; check the server's log"
    if isinstance(error, (aiohttp.ClientResponseError, InvalidResponse)):
        return "the response is not HTTP; check the address, and write https:// if the server uses TLS"
    return _describe_error(_find_os_error(error))


def parse_refusal(text: str) -> tuple[str, str | None]:
    """Return the error message in the body *text* of a rejection, and the name of the invalid parameter, if given."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        # aiohttp and others repeat the status at the start of the body.
        return re.sub(r"\A\d{3}:\s*", "", text.strip())[:MAX_EXCERPT_CHARS], None
    body = value if isinstance(value, dict) else {}
    message = next(_iter_messages(body), None)
    error = body.get("error")
    param = error.get("param") if isinstance(error, dict) else body.get("param")
    excerpt = message[:MAX_SENTENCE_CHARS] if message else text[:MAX_EXCERPT_CHARS]
    return excerpt, param if isinstance(param, str) else None


def _find_os_error(error: BaseException) -> BaseException:
    """Return the `OSError` that *error* wraps, or *error* itself if there is none."""
    outer = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    cause: BaseException | None = outer
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return cause or outer


def _get_errno(error: BaseException) -> int | None:
    """Return the errno of *error*.

    After attempts to connect to several addresses of a host, only the text of the error contains the number.
    """
    number = getattr(error, "errno", None)
    match = None if number else re.search(r"\[Errno (\d+)\]", str(error))
    return int(match[1]) if match else number


def _describe_error(error: BaseException) -> str:
    if isinstance(error, ssl.SSLError):
        return str(error.reason or error).replace("_", " ").lower()
    if isinstance(error, OSError) and (number := _get_errno(error)):
        return os.strerror(number)
    # The representations of Python objects mean nothing to users.
    return re.sub(r"<[^>]*>|\w+\(.*\)", "", str(error)).strip() or type(error).__name__


def _iter_messages(body: Item) -> Iterator[str]:
    """Yield the error messages in *body*, in the forms of OpenAI, FastAPI and others."""
    error = body.get("error")
    inner = error.get("message") if isinstance(error, dict) else error
    for value in (inner, body.get("message"), body.get("detail")):
        message = "; ".join(map(_format_detail, value)) if isinstance(value, list) else value
        if isinstance(message, str) and message.strip():
            yield message.strip().rstrip(".")


def _format_detail(detail: object) -> str:
    """Return one entry of the `detail` list, in which FastAPI reports the errors of pydantic, as text."""
    if not isinstance(detail, dict) or not isinstance(detail.get("msg"), str):
        return str(detail)
    location = ".".join(map(str, detail.get("loc") or ()))
    return f"{location}: {detail['msg']}" if location else str(detail["msg"])
