"""The resources server: serves one environment over HTTP with NeMo Gym's session, tool and verify endpoints."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from fastapi import FastAPI, Request, Response

from gymsdk.cluster.forwarding import ForwardingMiddleware, OtherInstances
from gymsdk.cluster.workers import Ownership
from gymsdk.config.model import DEFAULT_MAX_SESSIONS, DEFAULT_TTL_SECONDS
from gymsdk.edge.app import ServerApp
from gymsdk.edge.app import create_app as create_base_app
from gymsdk.edge.cookies import CookieMiddleware, cookie_name
from gymsdk.edge.errors import RequestRejected
from gymsdk.edge.openapi import RESPONSE_SCHEMA, build_row_schema, document_endpoint
from gymsdk.edge.request import get_state, json_response, read_json_object
from gymsdk.environment import Environment
from gymsdk.episode import JudgedEpisode
from gymsdk.errors import Unscorable
from gymsdk.line import (
    MASK,
    RESUMABLE_KINDS,
    ROLLOUT_INDEX,
    TASK_INDEX,
    WORKER_FAILURE_KINDS,
    build_failure_fields,
    build_verified_fields,
)
from gymsdk.observability.metrics import ServerMetrics, add_wait_metrics
from gymsdk.request_options import describe_opened
from gymsdk.servers import gymnasium, tool_calls
from gymsdk.servers.aggregates import aggregate_rows
from gymsdk.servers.episodes import EpisodeService
from gymsdk.servers.requests import (
    ROLLOUT_ID_FIELD,
    CloseRequest,
    RowRequest,
    SeedRequest,
    infer_end_reason,
    parse_body,
    parse_response,
    parse_row_request,
    strip_server_prefix,
)
from gymsdk.servers.session_clients import SessionClient, check_cookie_id, check_rollout_path
from gymsdk.servers.sessions import RETRY_AFTER_SECONDS, Session, SessionStore
from gymsdk.types import UNMASKED_FIELDS, Budget, Item, Row
from gymsdk.workers.offload import count_waiting_calls
from gymsdk.workers.resource_waits import GRADINGS

LOST_STATE_MESSAGE = "the session of this response is gone, and its state with it; play the row again"

log = logging.getLogger("gymsdk")


def create_app(  # noqa: PLR0913 - keyword arguments, each named by its caller
    environment: Environment,
    *,
    name: str | None = None,
    ttl: float = DEFAULT_TTL_SECONDS,
    max_sessions: int = DEFAULT_MAX_SESSIONS,
    budget: Budget | None = None,
    with_mcp: bool = False,
    metrics: ServerMetrics | None = None,
    peers: OtherInstances | None = None,
    owners: Ownership | None = None,
) -> FastAPI:
    """Create the resources server of an environment.

    The app's lifespan enters the environment and closes all sessions when the server stops.

    Args:
        environment: The environment to serve.
        name: The server's name; the environment's by default.
        ttl: Seconds that a session lasts after its last use.
        max_sessions: The largest number of open sessions.
        budget: The largest budget of an episode.
        with_mcp: Whether to offer the tools at `/mcp` too.
        metrics: The server's metrics; new ones by default.
        peers: The other instances, if several servers have this name.
        owners: Finds the worker that has a session whose id the client chose, if several processes serve the port.

    Returns:
        The ASGI app.
    """
    server_name = name or environment.name
    metrics = metrics or ServerMetrics(server_name)
    # A closed session's id stays in use, so its worker must answer for it, too.
    owners = None if owners is None else owners.with_scope("session", seconds=ttl)
    sessions: SessionStore[Session] = SessionStore(
        ttl=ttl, max_sessions=max_sessions, instance=peers.instance if peers else None, claims=owners
    )
    metrics.add_gauge("sessions_open", "Open sessions.", lambda: len(sessions))
    metrics.add_gauge("offloaded_calls_waiting", "Offloaded calls that wait for a worker.", count_waiting_calls)
    add_wait_metrics(metrics, GRADINGS)
    ready = asyncio.Event()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with environment, sessions.sweep_periodically():
            ready.set()
            try:
                yield
            finally:
                ready.clear()

    description = f"The resources server of the environment {environment.name}, version {environment.version}."
    app = create_base_app(server_name, description, metrics=metrics, ready=ready.is_set, lifespan=lifespan)
    app.add_middleware(
        CookieMiddleware,
        name=cookie_name("ResourcesServer", server_name),
        has_session=lambda token: sessions.find_by_token(token) is not None,
        max_age=ttl,
    )
    if peers is not None:
        app.add_middleware(ForwardingMiddleware, cookie=cookie_name("ResourcesServer", server_name), peers=peers)
    episodes = EpisodeService(environment, sessions, budget)
    server = ResourcesEndpoints(episodes, server_name, with_mcp=with_mcp, owners=owners)
    _add_routes(app, server)
    gymnasium.add_routes(app, server.episodes)
    if with_mcp:
        tool_calls.mcp_add_routes(app, server.episodes, server_name)
    tool_calls.add_routes(app, server.episodes)
    return app


class ResourcesEndpoints:
    """The endpoints of a resources server.

    Args:
        episodes: The open episodes.
        name: The server's name.
        with_mcp: Whether `/seed_session` returns the access to `/mcp`.
        owners: Finds the worker that has a session whose id the client chose.
    """

    def __init__(
        self, episodes: EpisodeService, name: str, *, with_mcp: bool = False, owners: Ownership | None = None
    ) -> None:
        self._owners = owners
        self.episodes = episodes
        self._environment = episodes.environment
        self._sessions = episodes.sessions
        self._name = name
        self._with_mcp = with_mcp
        self._seeding: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def seed(self, request: Request) -> Response:
        """Open a session and set its cookie. The row is the body, or `task_data` in NeMo Gym's typed body."""
        content = await read_json_object(request)
        if "resources_session_id" in content:
            seed = parse_body(SeedRequest, content)
            check_rollout_path(seed.episode_id, request.scope)
            forwarded = await self._forward_to_owner(request, seed.resources_session_id, content)
            return forwarded or await self._open_typed(request, seed)
        row_request = self._parse_request(request, content)
        session = await self.episodes.open_session(row_request, "tools", previous=self._find_session(request))
        get_state(request.scope).token = session.token
        return json_response(self._build_tool_access(session, "mcp") | _describe_episode(row_request, session))

    async def close(self, request: Request) -> Response:
        """Close the session that the body names, or else the session of the cookie; closing it twice is no error."""
        content = await read_json_object(request)
        session, trusted = self._find_session(request), tool_calls.CLIENT_HEADER in request.headers
        if "resources_session_id" in content:
            closing = parse_body(CloseRequest, content)
            name, episode = closing.resources_session_id, closing.episode_id
            if episode is not None:
                check_rollout_path(episode, request.scope)
            check_cookie_id(session.name if session else None, name)
            if (forwarded := await self._forward_to_owner(request, name, content)) is not None:
                return forwarded
            session, trusted = self._sessions.find_to_close(name, episode), True
        if session is not None:
            await self.episodes.leave_session(session, trusted=trusted)
            if session.close_error is not None:
                raise session.close_error
        return json_response({key: content[key] for key in ("resources_session_id",) if key in content})

    async def _forward_to_owner(self, request: Request, session_id: str, content: Item) -> Response | None:
        """Return the response of the worker that has a session, `None` if that is this process."""
        if self._owners is None:
            return None
        return await self._owners.forward(request, session_id, content)

    async def verify(self, request: Request) -> Response:
        """Judge a response to a row, in the state of its session if there is one."""
        content = await read_json_object(request)
        row_request, response = self._parse_request(request, content), parse_response(content)
        items = strip_server_prefix(response["output"], self._name)
        end_reason = infer_end_reason(row_request.options, response)
        session = self._find_session(request)
        if get_state(request.scope).is_lost and self._environment.needs_replay and _has_tool_call(items):
            raise RequestRejected(
                503,
                LOST_STATE_MESSAGE,
                retry_after=RETRY_AFTER_SECONDS,
                stage="verify",
                kind="session_lost",
                retryable=True,
            )
        try:
            judged, judged_session, reason = await self.episodes.judge(row_request, items, end_reason, session)
        except Unscorable as error:
            if session is None or session.kind != "typed":
                error.retryable = error.retryable or error.kind in RESUMABLE_KINDS | WORKER_FAILURE_KINDS
                raise
            return json_response(_build_unscored_row(row_request, content, error))
        return json_response(self._build_verified_row(row_request, content, judged, judged_session, reason))

    async def aggregate(self, request: Request) -> Response:
        """Return the metrics of verified rows."""
        return json_response(await aggregate_rows(self._environment, await read_json_object(request)))

    async def mode(self) -> Response:
        """Report NeMo Gym's mode `stateless`: `/verify` needs no session."""
        return json_response("stateless")

    async def _open_typed(self, request: Request, seed: SeedRequest) -> Response:
        # A client that loses the response sends the request again, even while the first one is still running.
        async with self._seeding.setdefault(seed.resources_session_id, asyncio.Lock()):
            session = await self._open_named(request, seed)
        get_state(request.scope).token = session.token
        return json_response(
            {"resources_session_id": seed.resources_session_id} | self._build_tool_access(session, "resources_tools")
        )

    async def _open_named(self, request: Request, seed: SeedRequest) -> Session:
        empty_prompt: Row = {"responses_create_params": {"input": []}}
        row_request = self._parse_request(
            request, {**empty_prompt, **seed.task_data, ROLLOUT_ID_FIELD: seed.episode_id.rollout_id}
        )
        token = get_state(request.scope).token
        existing = await self._sessions.find_repeated(seed.resources_session_id, seed, request, token)
        if existing is not None:
            return existing
        # NeMo Gym may send the prompt to the agent alone; then only the row in `/verify` contains it.
        return await self.episodes.open_session(
            row_request,
            "typed",
            name=seed.resources_session_id,
            client=SessionClient(request, seed.episode_id),
            opening=seed,
            previous=self._find_session(request),
            has_prompt="responses_create_params" in seed.task_data,
        )

    def _parse_request(self, request: Request, row: Row) -> RowRequest:
        return parse_row_request(row, self._environment, rollout=get_state(request.scope).rollout_id)

    def _find_session(self, request: Request) -> Session | None:
        return self._sessions.find_by_request(request.scope)

    def _build_tool_access(self, session: Session, key: str) -> Item:
        return {key: tool_calls.build_access(self._name, self._sessions.issue_key(session))} if self._with_mcp else {}

    def _build_verified_row(
        self,
        row_request: RowRequest,
        content: Row,
        judged: JudgedEpisode,
        judged_session: Session | None,
        reason: str | None,
    ) -> Item:
        details = {
            "environment": self._environment.name,
            "seed": row_request.seed if judged_session is None else judged_session.origin.seed,
            "ended": judged.ended,
        } | ({} if reason is None else {"session_unused": reason})
        is_echoed = row_request.options is None or row_request.options.echo
        return {
            **(_echo_row(row_request, content) if is_echoed else {}),
            **UNMASKED_FIELDS,
            **build_verified_fields(judged.reward, judged.components, judged.fields, details, judged.record),
        }


def _add_routes(app: ServerApp, endpoints: ResourcesEndpoints) -> None:
    task = endpoints.episodes.environment.task_type
    row_schema = build_row_schema(task)
    verify_schema = build_row_schema(task, response=RESPONSE_SCHEMA)
    typed_schema = SeedRequest.model_json_schema()
    seed_schema = {
        "anyOf": [row_schema, typed_schema],
        "$defs": {**row_schema.get("$defs", {}), **typed_schema["$defs"]},
    }
    reward = {"type": "object", "properties": {TASK_INDEX: {"type": "integer"}, ROLLOUT_INDEX: {"type": "integer"}}}
    rewards = {"verify_responses": {"type": "array", "items": reward}}
    aggregate = {"type": "object", "required": list(rewards), "properties": rewards}
    for path, endpoint, schema in (
        ("/seed_session", endpoints.seed, seed_schema),
        ("/close_session", endpoints.close, CloseRequest.model_json_schema()),
        ("/verify", endpoints.verify, verify_schema),
        ("/aggregate_metrics", endpoints.aggregate, aggregate),
    ):
        app.add_post(path, endpoint, **document_endpoint(schema))
    app.add_api_route("/reverify_mode", endpoints.mode, methods=["GET"])


def _echo_row(row_request: RowRequest, content: Row) -> Item:
    """Return the row, the prompt and the response as the client sent them."""
    prompt = {key: content[key] for key in ("responses_create_params",) if key in content}
    return {**row_request.row, **prompt, "response": content["response"]}


def _build_unscored_row(row_request: RowRequest, content: Row, error: Unscorable) -> Item:
    failure = {MASK: True, "failure_kind": error.kind, "failure_reason": str(error)}
    return {**_echo_row(row_request, content), "reward": 0.0, **failure, **build_failure_fields(error.kind)}


def _has_tool_call(items: Sequence[Item]) -> bool:
    return any(item.get("type") == "function_call" for item in items)


def _describe_episode(row_request: RowRequest, session: Session) -> Item:
    """Return the seed, the opening messages and the tools of an episode if the client is gymsdk's own."""
    if row_request.options is None:
        return {}
    return describe_opened(row_request.seed, session.episode.transcript.opening, session.tools)
