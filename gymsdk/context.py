"""A trail: which server, request and rollout a line of the log, or a call of another server, belongs to."""

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
"""The headers by which a call tells where it comes from."""

ID_PATTERN = re.compile(r"[A-Za-z0-9._:/@+=-]{1,128}")
"""What is taken for an id: it is written into logs, and sent on."""

NO_HEADERS: Mapping[str, str] = MappingProxyType({})

LogField: TypeAlias = str | int | float | bool | None


@dataclass(slots=True)
class LogContext:
    """The *server* that is at work, the *request* it answers, the *rollout* that is for, as far as they are known.

    What is *told* of the request goes into its line; its CPU goes to the *account*, or is *spent* until that is known.
    """

    server: str = ""
    request: str = ""
    rollout: str = ""
    fields: dict[str, LogField] = field(default_factory=dict)
    cpu_counter: CpuCounter | None = None
    cpu_seconds: float = 0.0


_log_context: ContextVar[LogContext | None] = ContextVar("gymsdk_trail", default=None)


def get_log_context() -> LogContext | None:
    """Give the trail of what runs, `None` where there is none."""
    return _log_context.get()


def set_log_context(trail: LogContext) -> Token[LogContext | None]:
    """Have what runs from now on be on *trail*."""
    return _log_context.set(trail)


def reset_log_context(token: Token[LogContext | None]) -> None:
    """Have what runs be where it was before `follow` gave *token*."""
    _log_context.reset(token)


def build_log_context(server: str, headers: Iterable[tuple[bytes, bytes]], rollout: str | None = None) -> LogContext:
    """Give the trail of a request to *server* that carries *headers*; the one in its path goes before theirs."""
    request, of = "", (rollout or "")[:128]
    for name, value in headers:
        if name == b"x-request-id":
            request = request or _parse_id(value)
        elif name == b"x-gymsdk-rollout":
            of = of or _parse_id(value)
    return LogContext(server, request or secrets.token_hex(8), of)


def set_rollout_id(rollout: str) -> None:
    """Say which *rollout* the request in hand is for, now that it is known."""
    here = _log_context.get()
    if here is not None and rollout:
        here.rollout = rollout


def add_log_fields(**fields: LogField) -> None:
    """Say more of the request in hand, for its line; nothing that a prompt, an answer or a key may be part of."""
    here = _log_context.get()
    if here is not None:
        here.fields.update(fields)


@contextmanager
def use_rollout_id(rollout: str) -> Iterator[None]:
    """Have what runs inside be for *rollout*; a request is for one alone, so its whole is."""
    here = _log_context.get()
    if not rollout or (here is not None and here.request):
        set_rollout_id(rollout)
        yield
        return
    token = _log_context.set(LogContext(rollout=rollout) if here is None else replace(here, rollout=rollout))
    try:
        yield
    finally:
        _log_context.reset(token)


def build_context_headers() -> Mapping[str, str]:
    """Give what a call of another server carries, nothing where nobody knows what it is for."""
    here = _log_context.get()
    if here is None:
        return NO_HEADERS
    ids = {REQUEST_ID_HEADER: here.request, ROLLOUT_ID_HEADER: here.rollout}
    return {header: value for header, value in ids.items() if value and ID_PATTERN.fullmatch(value)}


def _parse_id(value: bytes) -> str:
    text = value.decode("latin-1")
    return text if ID_PATTERN.fullmatch(text) else ""
