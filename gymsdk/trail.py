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
    from gymsdk.spent import Account

REQUEST, ROLLOUT = "x-request-id", "x-gymsdk-rollout"
"""The headers by which a call tells where it comes from."""

ID = re.compile(r"[A-Za-z0-9._:/@+=-]{1,128}")
"""What is taken for an id: it is written into logs, and sent on."""

NONE: Mapping[str, str] = MappingProxyType({})

Field: TypeAlias = str | int | float | bool | None


@dataclass(slots=True)
class Trail:
    """The *server* that is at work, the *request* it answers, the *rollout* that is for, as far as they are known.

    What is *told* of the request goes into its line; its CPU goes to the *account*, or is *spent* until that is known.
    """

    server: str = ""
    request: str = ""
    rollout: str = ""
    fields: dict[str, Field] = field(default_factory=dict)
    cpu_counter: Account | None = None
    cpu_seconds: float = 0.0


_current: ContextVar[Trail | None] = ContextVar("gymsdk_trail", default=None)


def current() -> Trail | None:
    """Give the trail of what runs, `None` where there is none."""
    return _current.get()


def follow(trail: Trail) -> Token[Trail | None]:
    """Have what runs from now on be on *trail*."""
    return _current.set(trail)


def leave(token: Token[Trail | None]) -> None:
    """Have what runs be where it was before `follow` gave *token*."""
    _current.reset(token)


def begun(server: str, headers: Iterable[tuple[bytes, bytes]], rollout: str | None = None) -> Trail:
    """Give the trail of a request to *server* that carries *headers*; the one in its path goes before theirs."""
    request, of = "", (rollout or "")[:128]
    for name, value in headers:
        if name == b"x-request-id":
            request = request or _id(value)
        elif name == b"x-gymsdk-rollout":
            of = of or _id(value)
    return Trail(server, request or secrets.token_hex(8), of)


def name(rollout: str) -> None:
    """Say which *rollout* the request in hand is for, now that it is known."""
    here = _current.get()
    if here is not None and rollout:
        here.rollout = rollout


def tell(**fields: Field) -> None:
    """Say more of the request in hand, for its line; nothing that a prompt, an answer or a key may be part of."""
    here = _current.get()
    if here is not None:
        here.fields.update(fields)


@contextmanager
def of_rollout(rollout: str) -> Iterator[None]:
    """Have what runs inside be for *rollout*; a request is for one alone, so its whole is."""
    here = _current.get()
    if not rollout or (here is not None and here.request):
        name(rollout)
        yield
        return
    token = _current.set(Trail(rollout=rollout) if here is None else replace(here, rollout=rollout))
    try:
        yield
    finally:
        _current.reset(token)


def headers() -> Mapping[str, str]:
    """Give what a call of another server carries, nothing where nobody knows what it is for."""
    here = _current.get()
    if here is None:
        return NONE
    ids = {REQUEST: here.request, ROLLOUT: here.rollout}
    return {header: value for header, value in ids.items() if value and ID.fullmatch(value)}


def _id(value: bytes) -> str:
    text = value.decode("latin-1")
    return text if ID.fullmatch(text) else ""
