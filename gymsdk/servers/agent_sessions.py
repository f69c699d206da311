"""The agent sessions of NeMo Gym 0.7: each gives an agent server access to the tools of an episode."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import Request
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from gymsdk.config.model import DEFAULT_MAX_SESSIONS, DEFAULT_TTL_SECONDS
from gymsdk.http import client
from gymsdk.http.client import Cookies
from gymsdk.http.connections import check_headers
from gymsdk.servers.errors import RequestRejected, ServerOverloaded
from gymsdk.servers.limits import Claims
from gymsdk.servers.requests import EpisodeId, TaskId
from gymsdk.servers.session_clients import ClosedIds, SessionClient, check_episode
from gymsdk.servers.tool_calls import SessionConnection

RETRY_AFTER_SECONDS = 5.0
"""`Retry-After` in seconds when no further session can be opened."""

SWEEP_SECONDS = 60.0
"""Seconds between two sweeps of expired sessions."""

MAX_CLOSED_SESSIONS = 10_000
"""Largest number of closed sessions whose ids, and replies to the close request, are remembered."""


def _check_headers(headers: dict[str, str]) -> dict[str, str]:
    check_headers(headers)
    return headers


class HttpToolAccess(BaseModel):
    """Access to tools by POST requests at a base URL."""

    model_config = ConfigDict(frozen=True)

    kind: Literal["direct_http"]
    name: str
    required: bool = True
    base_url: str = Field(pattern=r"^https?://[^/\s]+")
    cookies: dict[str, str] = {}
    headers: Annotated[dict[str, str], AfterValidator(_check_headers)] = {}


class McpToolAccess(BaseModel):
    """Access to tools by the Model Context Protocol."""

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
    """An open agent session.

    Attributes:
        opening: The body of the request that opened the session.
        connection: The connection to the tools of the session, if it has tools.
        token: The secret in the client's cookie.
        client: The client that opened the session, if known.
        last_used: When the session was last used, on the clock of `AgentSessions`.
    """

    opening: OpenAgentSession
    connection: SessionConnection | None
    token: str
    client: SessionClient | None = None
    last_used: float = 0.0


class AgentSessions:
    """The open agent sessions of one agent server.

    Args:
        ttl: Seconds after its last use when a session expires.
        max_sessions: The largest number of open sessions.
        instance: The id of this instance, if several servers have the same name; each token then starts with it.
        clock: Returns the time in seconds.
        claims: Keeps the ids of the client's sessions claimed while the sessions are open, and some time longer.
    """

    def __init__(
        self,
        *,
        ttl: float = DEFAULT_TTL_SECONDS,
        max_sessions: int = DEFAULT_MAX_SESSIONS,
        instance: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        claims: Claims | None = None,
    ) -> None:
        self._claims = claims
        self._prefix = "" if instance is None else f"{instance}."
        self._ttl = ttl
        self._max_sessions = max_sessions
        self._clock = clock
        self._open: OrderedDict[str, AgentSession] = OrderedDict()
        self._ids: dict[str, str] = {}
        self._closed = ClosedIds(MAX_CLOSED_SESSIONS)

    def __len__(self) -> int:
        """Return the number of open sessions."""
        return len(self._open)

    def open(
        self, opening: OpenAgentSession, connection: SessionConnection | None, client: SessionClient | None = None
    ) -> AgentSession:
        """Open a session; the same *opening* returns the same session, see `check_repeat`.

        Raises:
            RequestRejected: The id was used before, or there are too many sessions.
        """
        self.sweep()
        name = opening.agent_session_id
        existing = self._find_by_id(name)
        if existing is not None and existing.opening == opening:
            return existing
        if existing is not None or not self._closed.may_open(name, opening.episode_id):
            raise _build_id_error(name)
        if len(self._open) >= self._max_sessions:
            raise ServerOverloaded(
                f"all {self._max_sessions} agent sessions are in use; close some", retry_after=RETRY_AFTER_SECONDS
            )
        session = AgentSession(opening, connection, self._prefix + secrets.token_urlsafe(24), client, self._clock())
        self._open[session.token] = session
        self._ids[name] = session.token
        if self._claims is not None:
            self._claims.hold(name)
        return session

    async def check_repeat(self, opening: OpenAgentSession, request: Request, token: str | None) -> None:
        """Check that a request which opens a session that is open already comes from the client of that session.

        Args:
            opening: The body of the request.
            request: The request.
            token: The token in the request's cookie.

        Raises:
            RequestRejected: Another client has opened the session.
        """
        existing = self._find_by_id(opening.agent_session_id)
        if existing is None or existing.client is None or existing.opening != opening:
            return
        if not await existing.client.accept_retry(request, has_cookie=token == existing.token):
            raise _build_id_error(opening.agent_session_id)

    def find_by_token(self, token: str | None) -> AgentSession | None:
        """Return the session with this token and mark it as used, or return `None`."""
        self.sweep()
        session = self._open.get(token or "")
        if session is not None:
            session.last_used = self._clock()
            self._open.move_to_end(session.token)
        return session

    def close(self, closing: CloseAgentSession) -> Cookies | None:
        """Close a session and return the cookies of its tools; a repeated request returns the same cookies.

        A session that was never opened cannot be opened afterwards.

        Raises:
            RequestRejected: The session belongs to another episode.
        """
        name, episode = closing.agent_session_id, closing.episode_id
        session = self._find_by_id(name)
        if session is None:
            cookies: Cookies | None = self._closed.find_reply(name, episode)
            self._closed.fence(name, episode)
            return cookies
        check_episode(name, session.opening.episode_id, episode)
        self._remove(session)
        cookies = dict(session.connection.cookies) if session.connection else None
        self._closed.add(name, episode, cookies)
        return cookies

    @asynccontextmanager
    async def sweep_periodically(self) -> AsyncIterator[None]:
        """Remove expired sessions periodically inside the block."""
        sweeper = asyncio.ensure_future(self._sweep_forever())
        try:
            yield
        finally:
            sweeper.cancel()

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(min(SWEEP_SECONDS, self._ttl))
            self.sweep()

    def sweep(self) -> None:
        """Remove expired sessions."""
        limit = self._clock() - self._ttl
        while self._open and (oldest := next(iter(self._open.values()))).last_used <= limit:
            self._remove(oldest)

    def _find_by_id(self, name: str) -> AgentSession | None:
        return self._open.get(self._ids.get(name, ""))

    def _remove(self, session: AgentSession) -> None:
        del self._open[session.token]
        del self._ids[session.opening.agent_session_id]
        if self._claims is not None:
            self._claims.let_go(session.opening.agent_session_id, is_kept=True)


def _build_id_error(name: str) -> RequestRejected:
    return RequestRejected(409, f"an agent session {name!r} exists or existed; choose another id")


def connect_to_tools(
    opening: OpenAgentSession, headers_for: Callable[[str], client.Headers] | None = None
) -> SessionConnection | None:
    """Connect to the tools of an agent session.

    Args:
        opening: The body that opens the session.
        headers_for: Returns further headers for requests to a URL, such as the token.

    Returns:
        The connection, or `None` if the session has no tools.

    Raises:
        RequestRejected: The agent cannot use the requested access.
    """
    if opening.sandbox_access is not None:
        raise RequestRejected(422, "this agent does not support a sandbox; send the request without `sandbox_access`")
    accesses = [access for access in opening.tool_accesses if access.required or isinstance(access, HttpToolAccess)]
    if unsupported := [access.name for access in accesses if isinstance(access, McpToolAccess)]:
        raise RequestRejected(
            422, f"this agent only supports direct_http: change {unsupported[0]!r} to direct_http, or make it optional"
        )
    http_accesses = [access for access in accesses if isinstance(access, HttpToolAccess)]
    if len(http_accesses) > 1:
        raise RequestRejected(422, "this agent supports one tool server: send exactly one direct_http access")
    if not http_accesses:
        return None
    access = http_accesses[0]
    headers: client.Headers = headers_for(access.base_url) if headers_for else {}
    return SessionConnection(
        access.base_url.rstrip("/"), client.filter_cookies(access.cookies), {**headers, **access.headers}
    )
