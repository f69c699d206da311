"""The store of a server's open sessions: each session is found by an unguessable token and expires when unused."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from gymsdk.episode import EpisodeRunner
from gymsdk.servers.app import RequestRejected, ServerOverloaded
from gymsdk.types import ToolCall

RETRY_AFTER_SECONDS = 5.0
"""`Retry-After` in seconds when no further session can be opened."""

LEFT_SESSION_SECONDS = 600.0
"""Seconds that a session which its client left without a verdict waits for one."""

CLOSE_GRACE_SECONDS = 1.0
"""Seconds that a sweep waits for the sessions it closes; slower ones finish in the background."""

MAX_FENCED_NAMES = 100_000
"""How many names of closed sessions are remembered, so that they are not opened again."""


@dataclass(slots=True, eq=False)
class Session:
    """One client's open episode.

    Attributes:
        token: The secret in the client's cookie.
        runner: The running episode.
        name: The client's own id of the session, if it has one.
        key: A second secret that only allows tool calls, if one was issued.
        last_used: When the session was last used, on the store's clock.
        left: Whether the client left the session; it then closes soon, or when another session needs its place.
        lock: Keeps the session's calls from overlapping.
        extras: Further data of the server.
        calls: The tool calls received for this session in order of arrival, including rejected calls.
    """

    token: str
    runner: EpisodeRunner
    name: str | None = None
    key: str | None = None
    last_used: float = 0.0
    left: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    extras: dict[str, Any] = field(default_factory=dict)
    calls: list[ToolCall] = field(default_factory=list)


class SessionStore:
    """The open sessions of one server.

    Args:
        ttl: Seconds after its last use when a session expires.
        max_sessions: The largest number of open sessions.
        instance: The id of this instance, which each token then starts with, if several servers have one name.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        *,
        ttl: float = 3600.0,
        max_sessions: int = 10_000,
        instance: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._instance = instance
        self._ttl = ttl
        self._cap = max_sessions
        self._clock = clock
        self._open: OrderedDict[str, Session] = OrderedDict()
        self._named: dict[str, Session] = {}
        self._keyed: dict[str, Session] = {}
        self._fenced: OrderedDict[str, None] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()
        self._left: dict[Session, None] = {}

    def __len__(self) -> int:
        """Return the number of open sessions."""
        return len(self._open)

    async def open(self, runner: EpisodeRunner, *, name: str | None = None) -> Session:
        """Store an open episode under a new token.

        Raises:
            RequestRejected: The store is full, or the name was used before.
        """
        await self.check_capacity(name)
        session = Session(self._new_token(), runner, name, last_used=self._clock())
        self._open[session.token] = session
        if name is not None:
            self._named[name] = session
        return session

    async def check_capacity(self, name: str | None = None) -> None:
        """Check that another session can be opened, under `name` if given.

        Raises:
            RequestRejected: The store is full, or the name was used before.
        """
        if name is not None and (name in self._fenced or name in self._named):
            raise RequestRejected(409, f"a session {name!r} exists or existed; choose another id")
        if len(self._open) >= self._cap:
            await self.sweep()
        if len(self._open) >= self._cap:
            await self._await_closed(list(self._left)[:1])
        if len(self._open) >= self._cap:
            raise ServerOverloaded(
                f"all {self._cap} sessions are in use; close some, or try again later", retry_after=RETRY_AFTER_SECONDS
            )

    def find_by_token(self, token: str | None) -> Session | None:
        """Return the session with this token and mark it as used, or `None`."""
        session = self._open.get(token or "")
        if session is not None:
            session.last_used = self._clock()
            self._open.move_to_end(session.token)
        return session

    def is_open(self, session: Session) -> bool:
        """Return whether the session is open, without marking it as used."""
        return session.token in self._open

    def find_by_name(self, name: str) -> Session | None:
        """Return the open session that the client named `name`."""
        return self._named.get(name)

    def issue_key(self, session: Session) -> str:
        """Return the session's key, a second secret that only allows tool calls."""
        if session.key is None:
            session.key = self._new_token()
            self._keyed[session.key] = session
        return session.key

    def find_by_key(self, key: str | None) -> Session | None:
        """Return the open session with this key and mark it as used, or `None`."""
        session = self._keyed.get(key or "")
        return None if session is None else self.find_by_token(session.token)

    def _new_token(self) -> str:
        secret = secrets.token_urlsafe(24)
        return secret if self._instance is None else f"{self._instance}.{secret}"

    async def close(self, session: Session) -> None:
        """Close a session's episode and forget the session; repeated calls have no effect.

        The close runs to its end even if the caller is cancelled.
        """
        if (closing := self._begin_close(session)) is not None:
            await asyncio.shield(closing)

    def _begin_close(self, session: Session) -> asyncio.Task[None] | None:
        if self._open.pop(session.token, None) is None:
            return None
        self._left.pop(session, None)
        if session.name is not None:
            self._named.pop(session.name, None)
            self.block_name(session.name)
        if session.key is not None:
            self._keyed.pop(session.key, None)
        closing = asyncio.create_task(_close_episode(session))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        return closing

    def close_soon(self, session: Session) -> None:
        """Mark a session to be closed soon, or when another session needs its place."""
        session.left = True
        if self.is_open(session):
            self._left[session] = None

    def block_name(self, name: str) -> None:
        """Keep a session called `name` from being opened again."""
        self._fenced[name] = None
        if len(self._fenced) > MAX_FENCED_NAMES:
            self._fenced.popitem(last=False)

    async def sweep(self) -> None:
        """Close expired sessions; a session with a call under way is not expired."""
        now, shortest = self._clock(), min(LEFT_SESSION_SECONDS, self._ttl)
        unused = takewhile(lambda session: session.last_used <= now - shortest, self._open.values())
        old = [each for each in unused if each.left or each.last_used <= now - self._ttl]
        await self._await_closed([each for each in old if not each.lock.locked()])

    async def aclose(self) -> None:
        """Close all sessions; cancellation abandons those still closing."""
        for session in list(self._open.values()):
            self._begin_close(session)
        await asyncio.gather(*self._closing)

    async def _await_closed(self, sessions: Iterable[Session]) -> None:
        # All at the same time: each may take as long as the environment's `close` hook is allowed.
        closing = [task for session in sessions if (task := self._begin_close(session)) is not None]
        if closing:
            await asyncio.wait(closing, timeout=CLOSE_GRACE_SECONDS)


async def _close_episode(session: Session) -> None:
    async with session.lock:
        await session.runner.close()
