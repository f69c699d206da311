"""Sessions: the episodes that clients have open, and the rows they bring."""

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
"""Seconds a client is asked to wait where there is no place for another session."""

LEFT_SESSION_SECONDS = 600.0
"""Seconds that a session which was left without a verdict waits for one."""

CLOSE_GRACE_SECONDS = 1.0
"""Seconds that a look for what is to be closed waits for it: what takes longer goes on by itself."""

MAX_FENCED_NAMES = 100_000
"""How many closed sessions are remembered, so that nobody opens one of them again."""


@dataclass(slots=True, eq=False)
class Session:
    """One client's open episode; *lock* keeps its calls from overlapping, *kept* what its server keeps with it.

    *calls* are the tool calls that the server received for this session, refused ones included, in order of arrival.
    *name* is the client's own word for it, *key* another secret that finds it, where it has them. One that is *left*
    is closed soon, or when its place is needed.
    """

    token: str
    sitting: EpisodeRunner
    name: str | None = None
    key: str | None = None
    last_used: float = 0.0
    left: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    extras: dict[str, Any] = field(default_factory=dict)
    calls: list[ToolCall] = field(default_factory=list)


class SessionStore:
    """The open sessions of one server: at most *cap*, each forgotten *ttl* seconds after its last use.

    Where the server is one of several, a token says which *instance* has its session.
    """

    def __init__(
        self,
        *,
        ttl: float = 3600.0,
        cap: int = 10_000,
        instance: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._instance = instance
        self._ttl = ttl
        self._cap = cap
        self._clock = clock
        self._open: OrderedDict[str, Session] = OrderedDict()
        self._named: dict[str, Session] = {}
        self._keyed: dict[str, Session] = {}
        self._fenced: OrderedDict[str, None] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()
        self._left: dict[Session, None] = {}

    def __len__(self) -> int:
        """Give how many are open."""
        return len(self._open)

    async def open(self, sitting: EpisodeRunner, *, name: str | None = None) -> Session:
        """Keep *sitting*, opened by the caller, under a new token; raises `Refused` where there is no place for it."""
        await self.check_capacity(name)
        session = Session(self._new_token(), sitting, name, last_used=self._clock())
        self._open[session.token] = session
        if name is not None:
            self._named[name] = session
        return session

    async def check_capacity(self, name: str | None = None) -> None:
        """Raise `Refused` where there is no place for another session, or none for one of this *name*."""
        if name is not None and (name in self._fenced or name in self._named):
            raise RequestRejected(409, f"session {name!r} has been opened or closed before; choose another id")
        if len(self._open) >= self._cap:
            await self.sweep()
        if len(self._open) >= self._cap:
            await self._await_closed(list(self._left)[:1])
        if len(self._open) >= self._cap:
            raise ServerOverloaded(
                f"all {self._cap} sessions are in use; close some, or come back", retry_after=RETRY_AFTER_SECONDS
            )

    def find_by_token(self, token: str | None) -> Session | None:
        """Give the session with this *token*, which stays a while longer for it; `None` where there is none."""
        session = self._open.get(token or "")
        if session is not None:
            session.last_used = self._clock()
            self._open.move_to_end(session.token)
        return session

    def is_open(self, session: Session) -> bool:
        """Whether *session* is open; asking is no use of it."""
        return session.token in self._open

    def find_by_name(self, name: str) -> Session | None:
        """Give the open session a client calls *name*."""
        return self._named.get(name)

    def issue_key(self, session: Session) -> str:
        """Give another secret of this session, for who may call its tools and nothing else."""
        if session.key is None:
            session.key = self._new_token()
            self._keyed[session.key] = session
        return session.key

    def find_by_key(self, key: str | None) -> Session | None:
        """Give the open session with this *key*, which stays a while longer for it."""
        session = self._keyed.get(key or "")
        return None if session is None else self.find_by_token(session.token)

    def _new_token(self) -> str:
        secret = secrets.token_urlsafe(24)
        return secret if self._instance is None else f"{self._instance}.{secret}"

    async def close(self, session: Session) -> None:
        """Close a session's episode and forget it; once, however often it is asked.

        It is closed to the end also where nobody waits for it any more.
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
        """Have *session* be closed soon, or when its place is needed."""
        session.left = True
        if self.is_open(session):
            self._left[session] = None

    def block_name(self, name: str) -> None:
        """Have nobody open a session called *name* again."""
        self._fenced[name] = None
        if len(self._fenced) > MAX_FENCED_NAMES:
            self._fenced.popitem(last=False)

    async def sweep(self) -> None:
        """Close what nobody has used for the time to live; what is in the middle of a call is in use."""
        now, soonest = self._clock(), min(LEFT_SESSION_SECONDS, self._ttl)
        quiet = takewhile(lambda session: session.last_used <= now - soonest, self._open.values())
        old = [each for each in quiet if each.left or each.last_used <= now - self._ttl]
        await self._await_closed([each for each in old if not each.lock.locked()])

    async def aclose(self) -> None:
        """Close all; what is still being closed when this is cancelled is given up."""
        for session in list(self._open.values()):
            self._begin_close(session)
        await asyncio.gather(*self._closing)

    async def _await_closed(self, sessions: Iterable[Session]) -> None:
        # All at once, and each by itself: it may take as long as its environment's `close` is given.
        closing = [task for session in sessions if (task := self._begin_close(session)) is not None]
        if closing:
            await asyncio.wait(closing, timeout=CLOSE_GRACE_SECONDS)


async def _close_episode(session: Session) -> None:
    async with session.lock:
        await session.sitting.close()
