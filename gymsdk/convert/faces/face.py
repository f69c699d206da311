"""A face: one API as a server speaks it. Its requests become Responses requests, Responses its answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gymsdk.transcript import Item


class Malformed(Exception):
    """A body is no request of its API; *param* is what is wrong with it."""

    def __init__(self, sentence: str, param: str | None = None) -> None:
        super().__init__(sentence)
        self.param = param


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why there is no answer: the *status* of HTTP, a *sentence*, a *code* for programs, the *param* that is wrong."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class Face:
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
    build_error: Callable[[Trouble], Item]
    build_error_frames: Callable[[Trouble], bytes]
    heartbeat: bytes
