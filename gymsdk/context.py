"""The log context: the server, request and rollout that log lines and outgoing requests belong to."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from gymsdk.profiling import CpuCounter

REQUEST_ID_HEADER, ROLLOUT_ID_HEADER = "x-request-id", "x-gymsdk-rollout"
"""The headers that carry the ids of the request and the rollout between servers."""

ID_PATTERN = re.compile(r"[A-Za-z0-9._:/@+=-]{1,128}")
"""A valid id; other ids from clients are ignored, because ids are written into logs and sent to other servers."""

NO_HEADERS: Mapping[str, str] = MappingProxyType({})

LogField: TypeAlias = str | int | float | bool | None


@dataclass(slots=True)
class LogContext:
    """The server, request and rollout that the running code works for.

    Attributes:
        server: The server's name; empty if unknown.
        request: The id of the request that the server answers; empty if unknown.
        rollout: The id of the rollout that the request belongs to; empty if unknown.
        fields: Further fields for the log line of the request.
        cpu_counter: The counter that receives the request's CPU time, once its route is known.
        cpu_seconds: The request's CPU time until then.
    """

    server: str = ""
    request: str = ""
    rollout: str = ""
    fields: dict[str, LogField] = field(default_factory=dict)
    cpu_counter: CpuCounter | None = None
    cpu_seconds: float = 0.0


_log_context: ContextVar[LogContext | None] = ContextVar("gymsdk_log_context", default=None)


def get_log_context() -> LogContext | None:
    """Return the log context of the running code, or `None`."""
    return _log_context.get()


def set_log_context(context: LogContext) -> Token[LogContext | None]:
    """Make *context* the log context of the running code; `reset_log_context` undoes it."""
    return _log_context.set(context)


def reset_log_context(token: Token[LogContext | None]) -> None:
    """Restore the log context that was current before the call of `set_log_context` that returned *token*."""
    _log_context.reset(token)


def build_log_context(server: str, headers: Iterable[tuple[bytes, bytes]], rollout: str | None = None) -> LogContext:
    """Return the log context of a request.

    Args:
        server: The name of the server that received the request.
        headers: The headers of the request, as in an ASGI scope.
        rollout: The rollout id in the request's path, if any; it takes precedence over the header.
    """
    request_id, rollout_id = "", (rollout or "")[:128]
    for name, value in headers:
        if name == b"x-request-id":
            request_id = request_id or _parse_id(value)
        elif name == b"x-gymsdk-rollout":
            rollout_id = rollout_id or _parse_id(value)
    return LogContext(server, request_id or secrets.token_hex(8), rollout_id)


def set_rollout_id(rollout: str) -> None:
    """Set the rollout id of the current log context, unless *rollout* is empty."""
    current = _log_context.get()
    if current is not None and rollout:
        current.rollout = rollout


def add_log_fields(**fields: LogField) -> None:
    """Add *fields* to the log line of the current request.

    They must not contain any part of a prompt, a response or a key.
    """
    current = _log_context.get()
    if current is not None:
        current.fields.update(fields)


@contextmanager
def use_rollout_id(rollout: str) -> Iterator[None]:
    """Set the rollout id inside the block.

    Inside a request the id stays set, because a request belongs to one rollout.
    """
    current = _log_context.get()
    if not rollout or (current is not None and current.request):
        set_rollout_id(rollout)
        yield
        return
    token = _log_context.set(LogContext(rollout=rollout) if current is None else replace(current, rollout=rollout))
    try:
        yield
    finally:
        _log_context.reset(token)


def build_context_headers() -> Mapping[str, str]:
    """Return the headers that pass the request and rollout ids to another server; empty without a log context."""
    current = _log_context.get()
    if current is None:
        return NO_HEADERS
    ids = {REQUEST_ID_HEADER: current.request, ROLLOUT_ID_HEADER: current.rollout}
    return {header: value for header, value in ids.items() if value and ID_PATTERN.fullmatch(value)}


def _parse_id(value: bytes) -> str:
    text = value.decode("latin-1")
    return text if ID_PATTERN.fullmatch(text) else ""
