"""The sessions in which an agent server calls tools: a caller's own, and the agent sessions of NeMo Gym 0.7."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from gymsdk import tools
from gymsdk.edge.errors import RequestRejected
from gymsdk.http import client
from gymsdk.http.client import Cookies
from gymsdk.http.connections import check_headers
from gymsdk.servers.requests import EpisodeId, TaskId
from gymsdk.servers.sessions import StoredSession
from gymsdk.servers.tool_calls import SessionConnection, call_tool
from gymsdk.types import Action, Episode, Message, Row, Step, Task, Transcript, Verdict


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


@dataclass(slots=True, eq=False, kw_only=True)
class AgentSession(StoredSession):
    """An open agent session; `connection` leads to its tools, if it has tools."""

    connection: SessionConnection | None

    def build_close_reply(self) -> Cookies | None:
        """Return the cookies of the tools, with which the client has the response judged."""
        return dict(self.connection.cookies) if self.connection else None


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
    # A caller marks an access as not required if the agent can do without it.
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


@runtime_checkable
class SessionLocator(Protocol):
    """Connects to sessions at one resources server, or at several."""

    def open_connection(
        self, cookies: Mapping[str, str] | None = None
    ) -> SessionConnection | Awaitable[SessionConnection]:
        """Return a connection to the session of these cookies."""

    def auth_headers(self, base_url: str) -> client.Headers:
        """Return the headers for requests to `base_url`: the token, if `base_url` is one of these servers."""


class CallerSession:
    """An environment that plays in a session which the caller opened: it calls the session's tools and does not judge.

    Args:
        name: The environment's name.
        connection: The connection to the session; without it the episode has no tools.
    """

    def __init__(self, name: str, connection: SessionConnection | None) -> None:
        self.name = name
        self._connection = connection

    async def reset(
        self, row: Row | Task, *, seed: int = 0, id: str = "", repeat: int = 0, deadline: float | None = None
    ) -> Episode:
        """Start an episode that continues the conversation in the row's request."""
        task = row if isinstance(row, Task) else Task.model_validate(row)
        params = task.responses_create_params
        return Episode(
            id=id,
            seed=seed,
            task=task,
            row=row if isinstance(row, dict) else task.row(),
            environment=self,
            transcript=Transcript(opening=task.input),
            tools=(params.get("tools") or []) if self._connection else [],
            repeat=repeat,
            deadline=deadline,
        )

    async def step(self, episode: Episode, action: Action) -> Step:
        """Call a tool; a plain reply ends the episode."""
        if isinstance(action, Message):
            return Step(done=True)
        if self._connection is None:
            # A model may call a tool although the request offers none.
            return Step(output=tools.format_error_output(tools.format_unknown_tool(action.name, {})))
        return await call_tool(self._connection, action, episode.tools, deadline=episode.deadline)

    async def verify(self, episode: Episode) -> Verdict:  # noqa: ARG002 - the caller judges the episode
        """Return a placeholder: the caller has the response judged."""
        return Verdict(reward=0.0)

    async def close(self, episode: Episode) -> None:
        """Leave the session open: it belongs to the caller."""
