"""Reasons: why a server gave no answer, or refused, in words of its own or in plain ones."""

from __future__ import annotations

import errno
import os
import re
import socket
import ssl
from collections.abc import Iterator

import aiohttp
import orjson

from gymsdk.types import Item

MAX_EXCERPT_CHARS = 200
"""Characters shown of a text that is no sentence of a server."""

MAX_SENTENCE_CHARS = 500
"""Characters shown of one that is."""

FAILURE_KINDS = {
    401: "model_unauthorized",
    403: "model_unauthorized",
    404: "model_not_found",
    429: "model_rate_limited",
}
"""What statuses say of a model's server."""

_STATUS_HINTS = {
    401: "; check the API key",
    403: "; check the API key",
    404: "; check the base URL (it usually ends in /v1) and the model's name",
    429: "; lower the load, or wait",
}
_MIN_SERVER_ERROR = 500

_ERRNO_MESSAGES = {
    errno.ECONNREFUSED: "nothing listens there; is the server running?",
    errno.EHOSTUNREACH: "there is no way to that machine; check the address",
    errno.ENETUNREACH: "there is no way to that network; check the address",
}


def get_status_hint(status: int) -> str:
    """Give what to do about a refusal with this *status*, to follow what was said of it."""
    return _STATUS_HINTS.get(status) or ("; its own log says more" if status >= _MIN_SERVER_ERROR else "")


def describe_connect_error(error: Exception) -> str:
    """Give why nobody could be sent anything, and what to look at."""
    cause = _find_os_error(error)
    if isinstance(cause, socket.gaierror):
        return "no machine of that name is known; check the name"
    if isinstance(cause, ssl.SSLError):
        return f"TLS cannot be spoken with it ({_describe_error(cause)}); write http:// if it speaks none"
    if isinstance(cause, TimeoutError):
        return "it took no connection in time; is the server running?"
    return _ERRNO_MESSAGES.get(_get_errno(cause) or 0, f"{_describe_error(cause)}; is the server running?")


def describe_interruption(error: Exception) -> str:
    """Give how a server broke off its answer."""
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "the connection was closed before anything came; its log may say why"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "the connection was closed in the middle of it; its log may say why"
    if isinstance(error, aiohttp.ClientResponseError):
        return "what came is no HTTP; check the address, and write https:// if the server speaks TLS"
    return _describe_error(_find_os_error(error))


def _find_os_error(error: BaseException) -> BaseException:
    """What the system said, which libraries wrap."""
    given = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    found: BaseException | None = given
    while found is not None and not isinstance(found, OSError):
        found = found.__cause__ or found.__context__
    return found or given


def _get_errno(error: BaseException) -> int | None:
    """The system's number for *error*; that of several, of which each is an address of the machine, is in the text."""
    number = getattr(error, "errno", None)
    found = None if number else re.search(r"\[Errno (\d+)\]", str(error))
    return int(found[1]) if found else number


def _describe_error(error: BaseException) -> str:
    if isinstance(error, ssl.SSLError):
        return str(error.reason or error).replace("_", " ").lower()
    if isinstance(error, OSError) and (number := _get_errno(error)):
        return os.strerror(number)
    # What names an object of a program is nothing to people.
    return re.sub(r"<[^>]*>|\w+\(.*\)", "", str(error)).strip() or type(error).__name__


def parse_refusal(text: str) -> tuple[str, str | None]:
    """Give what a refusal of that *text* says in the server's own words, and the parameter it blames."""
    try:
        told = orjson.loads(text)
    except orjson.JSONDecodeError:
        # As aiohttp and others write it, after the status that is told anyway.
        return re.sub(r"\A\d{3}:\s*", "", text.strip())[:MAX_EXCERPT_CHARS], None
    body = told if isinstance(told, dict) else {}
    found = next(_iter_messages(body), None)
    error = body.get("error")
    blamed = error.get("param") if isinstance(error, dict) else body.get("param")
    return (found or text)[: MAX_SENTENCE_CHARS if found else MAX_EXCERPT_CHARS], blamed if isinstance(
        blamed, str
    ) else None


def _iter_messages(body: Item) -> Iterator[str]:
    error = body.get("error")
    own = error.get("message") if isinstance(error, dict) else error
    for said in (own, body.get("message"), body.get("detail")):
        words = "; ".join(map(_format_detail, said)) if isinstance(said, list) else said
        if isinstance(words, str) and words.strip():
            yield words.strip().rstrip(".")


def _format_detail(each: object) -> str:
    """One of pydantic's complaints, as FastAPI lists them."""
    if not isinstance(each, dict) or not isinstance(each.get("msg"), str):
        return str(each)
    where = ".".join(map(str, each.get("loc") or ()))
    return f"{where}: {each['msg']}" if where else str(each["msg"])
