"""Engagements: the agent sessions of NeMo Gym 0.7, each an episode that an agent has been told the tools of."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from gymsdk.http import client
from gymsdk.http.client import Cookies
from gymsdk.servers.app import RequestRejected, ServerOverloaded
from gymsdk.servers.requests import EpisodeId, TaskId
from gymsdk.servers.tool_calls import SessionConnection

RETRY_AFTER_SECONDS = 5.0
"""Seconds a client is asked to wait where there is no place for another session."""

SWEEP_SECONDS = 60.0
"""Seconds between two looks for sessions that nobody uses any more."""

MAX_CLOSED_SESSIONS = 10_000
"""How many closed sessions are remembered, with what their closing answered."""


class HttpToolAccess(BaseModel):
    """Tools that are called by POST at a base URL, with cookies and headers."""

    model_config = ConfigDict(frozen=True)

    kind: Literal["direct_http"]
    name: str
    required: bool = True
    base_url: str = Field(pattern=r"^https?://[^/\s]+")
    cookies: dict[str, str] = {}
    headers: dict[str, str] = {}


class McpToolAccess(BaseModel):
    """Tools that are called by the Model Context Protocol."""

    model_config = ConfigDict(frozen=True)

    kind: Literal["mcp"]
    name: str
    required: bool = True
    connection: dict[str, Any] = {}


class OpenAgentSession(BaseModel):
    """The body that opens an agent session."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    agent_session_id: str = Field(min_length=1)
    episode_id: EpisodeId
    task_id: TaskId
    tool_accesses: list[Annotated[HttpToolAccess | McpToolAccess, Field(discriminator="kind")]] = []
    sandbox_access: dict[str, Any] | None = None


class CloseAgentSession(BaseModel):
    """The body that closes an agent session."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    agent_session_id: str = Field(min_length=1)
    episode_id: EpisodeId


@dataclass(slots=True, eq=False)
class AgentSession:
    """One open agent session: what it was opened with, the *line* to its tools, the *token* it is found by."""

    opening: OpenAgentSession
    line: SessionConnection | None
    token: str
    last_used: float = 0.0


class AgentSessions:
    """The agent sessions of one agent: at most *cap*, each forgotten *ttl* seconds after its last use."""

    def __init__(self, *, ttl: float = 3600.0, cap: int = 10_000, clock: Callable[[], float] = time.monotonic) -> None:
        self._ttl = ttl
        self._cap = cap
        self._clock = clock
        self._open: OrderedDict[str, AgentSession] = OrderedDict()
        self._ids: dict[str, str] = {}
        self._closed: OrderedDict[str, Cookies | None] = OrderedDict()

    def __len__(self) -> int:
        """Give how many are open."""
        return len(self._open)

    def open(self, opening: OpenAgentSession, line: SessionConnection | None) -> AgentSession:
        """Give the session of *opening*: the one there is where the same has been asked for; raises `Refused`."""
        self.sweep()
        known = self._open.get(self._ids.get(opening.agent_session_id, ""))
        if known is not None and known.opening == opening:
            return known
        if known is not None or opening.agent_session_id in self._closed:
            raise RequestRejected(409, f"agent session {opening.agent_session_id!r} has been opened or closed before")
        if len(self._open) >= self._cap:
            raise ServerOverloaded(
                f"all {self._cap} agent sessions are in use; close some", retry_after=RETRY_AFTER_SECONDS
            )
        made = AgentSession(opening, line, secrets.token_urlsafe(24), self._clock())
        self._open[made.token] = made
        self._ids[opening.agent_session_id] = made.token
        return made

    def find_by_token(self, token: str | None) -> AgentSession | None:
        """Give the session with this *token*, which stays a while longer for it."""
        self.sweep()
        engagement = self._open.get(token or "")
        if engagement is not None:
            engagement.last_used = self._clock()
            self._open.move_to_end(engagement.token)
        return engagement

    def close(self, closing: CloseAgentSession) -> Cookies | None:
        """Close a session, and give the cookies of its tools; again, the same; one never opened cannot be opened then.

        Raises `Refused` where it is another episode's.
        """
        name = closing.agent_session_id
        engagement = self._open.get(self._ids.get(name, ""))
        if engagement is not None and engagement.opening.episode_id != closing.episode_id:
            raise RequestRejected(409, f"agent session {name!r} belongs to another episode")
        if engagement is not None:
            self._drop(engagement)
        jar = dict(engagement.line.jar) if engagement is not None and engagement.line else None
        self._closed.setdefault(name, jar)
        if len(self._closed) > MAX_CLOSED_SESSIONS:
            self._closed.popitem(last=False)
        return self._closed[name]

    @asynccontextmanager
    async def sweep_periodically(self) -> AsyncIterator[None]:
        """Forget, inside the block, what nobody uses, whether anybody asks or not."""
        sweeping = asyncio.ensure_future(self._sweep_forever())
        try:
            yield
        finally:
            sweeping.cancel()

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(min(SWEEP_SECONDS, self._ttl))
            self.sweep()

    def sweep(self) -> None:
        """Forget what nobody has used for too long."""
        limit = self._clock() - self._ttl
        while self._open and (oldest := next(iter(self._open.values()))).last_used <= limit:
            self._drop(oldest)

    def _drop(self, engagement: AgentSession) -> None:
        del self._open[engagement.token]
        del self._ids[engagement.opening.agent_session_id]


def connect_to_tools(
    opening: OpenAgentSession, carried: Callable[[str], client.Headers] | None = None
) -> SessionConnection | None:
    """Give the line to the tools of *opening*, `None` where it has none; raises `Refused` where they cannot be had.

    *carried* gives what requests to a URL carry beside what the opening says.
    """
    if opening.sandbox_access is not None:
        raise RequestRejected(422, "this agent works without a sandbox; leave `sandbox_access` out")
    wanted = [each for each in opening.tool_accesses if each.required or isinstance(each, HttpToolAccess)]
    if strange := [each.name for each in wanted if isinstance(each, McpToolAccess)]:
        raise RequestRejected(
            422, f"this agent calls tools by direct_http alone: make {strange[0]!r} that, or not required"
        )
    direct = [each for each in wanted if isinstance(each, HttpToolAccess)]
    if len(direct) > 1:
        raise RequestRejected(422, "this agent takes the tools of one server: leave one direct_http access")
    return next((_build_connection(each, carried(each.base_url) if carried else {}) for each in direct), None)


def _build_connection(access: HttpToolAccess, carried: client.Headers) -> SessionConnection:
    return SessionConnection(
        access.base_url.rstrip("/"), client.filter_cookies(access.cookies), {**carried, **access.headers}
    )
