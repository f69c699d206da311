"""Sessions: the episodes clients have open, each found again by a token nobody can guess."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from gymsdk.servers.app import Refused
from gymsdk.sitting import Sitting

PAUSE = 5.0
"""Seconds a client is asked to wait where there is no place for another session."""

FENCED = 100_000
"""How many closed sessions are remembered, so that nobody opens one of them again."""


@dataclass(slots=True, eq=False)
class Session:
    """One client's open episode; *lock* keeps its calls from overlapping, *kept* what its server keeps with it.

    *name* is the client's own word for it, *key* another secret that finds it, where it has them.
    """

    token: str
    sitting: Sitting
    name: str | None = None
    key: str | None = None
    used: float = 0.0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    kept: dict[str, Any] = field(default_factory=dict)


class Sessions:
    """The open sessions of one server: at most *cap*, each forgotten *ttl* seconds after its last use."""

    def __init__(self, *, ttl: float = 3600.0, cap: int = 10_000, clock: Callable[[], float] = time.monotonic) -> None:
        self._ttl = ttl
        self._cap = cap
        self._clock = clock
        self._open: OrderedDict[str, Session] = OrderedDict()
        self._named: dict[str, Session] = {}
        self._keyed: dict[str, Session] = {}
        self._fenced: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        """Give how many are open."""
        return len(self._open)

    async def open(self, sitting: Sitting, *, name: str | None = None) -> Session:
        """Keep *sitting*, opened by the caller, under a new token; raises `Refused` where there is no place for it."""
        await self.check(name)
        session = Session(secrets.token_urlsafe(24), sitting, name, used=self._clock())
        self._open[session.token] = session
        if name is not None:
            self._named[name] = session
        return session

    async def check(self, name: str | None = None) -> None:
        """Raise `Refused` where there is no place for another session, or none for one of this *name*."""
        if name is not None and (name in self._fenced or name in self._named):
            raise Refused(409, f"session {name!r} has been opened or closed before; choose another id")
        if len(self._open) >= self._cap:
            await self.sweep()
        if len(self._open) >= self._cap:
            raise Refused(503, f"all {self._cap} sessions are in use; close some, or come back", retry_after=PAUSE)

    def found(self, token: str | None) -> Session | None:
        """Give the session with this *token*, which stays a while longer for it; `None` where there is none."""
        session = self._open.get(token or "")
        if session is not None:
            session.used = self._clock()
            self._open.move_to_end(session.token)
        return session

    def named(self, name: str) -> Session | None:
        """Give the open session a client calls *name*."""
        return self._named.get(name)

    def key(self, session: Session) -> str:
        """Give another secret of this session, for who may call its tools and nothing else."""
        if session.key is None:
            session.key = secrets.token_urlsafe(24)
            self._keyed[session.key] = session
        return session.key

    def keyed(self, key: str | None) -> Session | None:
        """Give the open session with this *key*, which stays a while longer for it."""
        session = self._keyed.get(key or "")
        return None if session is None else self.found(session.token)

    async def close(self, session: Session) -> None:
        """Close a session's episode and forget it; once, however often it is asked."""
        if self._open.pop(session.token, None) is None:
            return
        if session.name is not None:
            self._named.pop(session.name, None)
            self.fence(session.name)
        if session.key is not None:
            self._keyed.pop(session.key, None)
        async with session.lock:
            await session.sitting.close()

    def fence(self, name: str) -> None:
        """Have nobody open a session called *name* again."""
        self._fenced[name] = None
        if len(self._fenced) > FENCED:
            self._fenced.popitem(last=False)

    async def sweep(self) -> None:
        """Close what nobody has used for the time to live."""
        limit = self._clock() - self._ttl
        await self._close(list(takewhile(lambda session: session.used <= limit, self._open.values())))

    async def aclose(self) -> None:
        """Close all."""
        await self._close(list(self._open.values()))

    async def _close(self, sessions: Iterable[Session]) -> None:
        # All at once: each may take as long as its environment's `close` is given.
        async with asyncio.TaskGroup() as group:
            for session in sessions:
                group.create_task(self.close(session))
