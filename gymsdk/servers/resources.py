"""The resources server: one environment behind HTTP, its episodes opened, called and judged as NeMo Gym's are."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from weakref import WeakValueDictionary

from fastapi import FastAPI, Request, Response

from gymsdk.environment import Environment
from gymsdk.episode import Budget, JudgedEpisode
from gymsdk.errors import Unscorable
from gymsdk.metrics import ROLLOUT_INDEX, TASK_INDEX
from gymsdk.observability.metrics import ServerMetrics
from gymsdk.rollouts.folder import AGAIN, LOST
from gymsdk.servers import gymnasium, mcp, tool_calls
from gymsdk.servers.aggregates import aggregate_rows
from gymsdk.servers.app import (
    RESPONSE_SCHEMA,
    RequestRejected,
    build_row_schema,
    document_endpoint,
    json_response,
    read_json_object,
)
from gymsdk.servers.app import create_app as bare
from gymsdk.servers.auth import CookieMiddleware, cookie_name
from gymsdk.servers.episodes import EpisodeService
from gymsdk.servers.forwarding import ForwardingMiddleware, Peers
from gymsdk.servers.requests import (
    ROLLOUT_ID_FIELD,
    CloseRequest,
    RowRequest,
    SeedRequest,
    infer_end_reason,
    parse_body,
    parse_response,
    parse_row_request,
)
from gymsdk.servers.sessions import RETRY_AFTER_SECONDS, Session, SessionStore
from gymsdk.types import UNMASKED_FIELDS, Item, Row

DEFAULT_TTL_SECONDS, DEFAULT_MAX_SESSIONS, SWEEP_SECONDS = 3600.0, 10_000, 15.0
"""Seconds a session lasts after its last use, how many may be open, seconds between two looks for those to close."""

CLOSE_SECONDS = 30.0
"""Seconds that closing what is open may take as the server ends."""

LOST_STATE_MESSAGE = "the session that this was played in is gone, and its state with it; play the row again"

log = logging.getLogger("gymsdk")


def create_app(
    environment: Environment,
    *,
    name: str | None = None,
    ttl: float = DEFAULT_TTL_SECONDS,
    cap: int = DEFAULT_MAX_SESSIONS,
    budget: Budget | None = None,
    with_mcp: bool = False,
    figures: ServerMetrics | None = None,
    peers: Peers | None = None,
) -> FastAPI:
    """Give the app that serves *environment* under its *name*: at most *cap* sessions, each *ttl* seconds after use.

    *with_mcp* offers its tools at `/mcp` too. The app enters the environment and closes what is open at its end.
    Where there are several of a name, *peers* are the others.
    """
    served = name or environment.name
    figures = figures or ServerMetrics(served)
    sessions = SessionStore(ttl=ttl, cap=cap, instance=peers.instance if peers else None)
    figures.gauges["sessions_open"] = lambda: len(sessions)
    ready = asyncio.Event()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with environment, asyncio.TaskGroup() as group:
            over = asyncio.Event()
            sweeping = group.create_task(_sweep_until(sessions, over, min(SWEEP_SECONDS, max(ttl, 0.05))))
            ready.set()
            try:
                yield
            finally:
                ready.clear()
                over.set()
                await _end_sessions(sessions, sweeping)

    about = f"The resources server of the environment {environment.name}, version {environment.version}."
    made = bare(served, about, figures=figures, ready=ready.is_set, lifespan=lifespan)
    made.add_middleware(
        CookieMiddleware,
        name=cookie_name("ResourcesServer", served),
        known=lambda token: sessions.find_by_token(token) is not None,
        lasts=ttl,
    )
    if peers is not None:
        made.add_middleware(ForwardingMiddleware, cookie=cookie_name("ResourcesServer", served), peers=peers)
    server = ResourcesEndpoints(EpisodeService(environment, sessions, budget), served, with_mcp=with_mcp)
    _add_routes(made, server)
    gymnasium.add_routes(made, server.episodes)
    if with_mcp:
        mcp.add_routes(made, server.episodes, served)
    tool_calls.add_routes(made, server.episodes)
    return made


async def _sweep_until(sessions: SessionStore, over: asyncio.Event, seconds: float) -> None:
    """Close what nobody uses, every few *seconds*, until it is *over*: what is being closed then is closed still."""
    while not over.is_set():
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await over.wait()
        try:
            await sessions.sweep()
        except Exception:
            # What is a bug in closing one session must not end the closing of the others.
            log.exception("sessions could not be closed")


async def _end_sessions(sessions: SessionStore, sweeping: asyncio.Task[None]) -> None:
    try:
        async with asyncio.timeout(CLOSE_SECONDS):
            await sweeping
            await sessions.aclose()
    except TimeoutError:
        log.warning(
            "not every session was closed within %g seconds; what they hold is left to the system", CLOSE_SECONDS
        )


class ResourcesEndpoints:
    """The endpoints of the environment *name*; *with_mcp* says that who opens a session is told of `/mcp`."""

    def __init__(self, episodes: EpisodeService, name: str, *, with_mcp: bool = False) -> None:
        self.episodes = episodes
        self._environment = episodes.environment
        self._sessions = episodes.sessions
        self._name = name
        self._with_mcp = with_mcp
        self._seeding: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def seed(self, request: Request) -> Response:
        """Open a session of a row, flat or in the typed body; its cookie is in the answer."""
        given_body = await read_json_object(request)
        if "resources_session_id" in given_body:
            return await self._open_typed(request, parse_body(SeedRequest, given_body))
        row = self._parse_request(request, given_body)
        session = await self.episodes.open_session(row, "tools", left=self._find_session(request))
        request.scope["state"]["token"] = session.token
        return json_response(self._build_tool_access(session, "mcp") | _describe_episode(row, session))

    async def close(self, request: Request) -> Response:
        """Close a session: the one named, or that of the cookie; one there is none of has been closed."""
        given_body = await read_json_object(request)
        if "resources_session_id" not in given_body:
            session, trusted = self._find_session(request), tool_calls.CLIENT_HEADER in request.headers
        else:
            name = parse_body(CloseRequest, given_body).resources_session_id
            self._sessions.block_name(name)
            session, trusted = self._sessions.find_by_name(name), True
        if session is not None:
            await self.episodes.leave_session(session, trusted=trusted)
            if session.sitting.close_error is not None:
                raise session.sitting.close_error
        return json_response({key: given_body[key] for key in ("resources_session_id",) if key in given_body})

    async def verify(self, request: Request) -> Response:
        """Judge a response to a row, with the session's state where there is one."""
        given_body = await read_json_object(request)
        row, response = self._parse_request(request, given_body), parse_response(given_body)
        items, end = mcp.strip_server_prefix(response["output"], self._name), infer_end_reason(given_body, response)
        session = self._find_session(request)
        if request.scope["state"]["lost"] and self._environment.needs_replay and _has_tool_call(items):
            raise RequestRejected(
                503,
                LOST_STATE_MESSAGE,
                retry_after=RETRY_AFTER_SECONDS,
                stage="verify",
                kind="session_lost",
                retryable=True,
            )
        try:
            judged, used, why = await self.episodes.judge(row, items, end, session)
        except Unscorable as error:
            if session is None or session.extras["face"] != "typed":
                error.retryable = error.retryable or error.kind in AGAIN | LOST
                raise
            return json_response(_build_unscored_row(row, given_body, error))
        return json_response(self._build_verified_row(row, given_body, judged, used, why))

    async def aggregate(self, request: Request) -> Response:
        """Give the figures over verified rows."""
        return json_response(await aggregate_rows(self._environment, await read_json_object(request)))

    async def mode(self) -> Response:
        """Say that a verdict needs no session."""
        return json_response("stateless")

    async def _open_typed(self, request: Request, seed: SeedRequest) -> Response:
        # The answer may be lost and the request sent again, even while the first is being seen to.
        async with self._seeding.setdefault(seed.resources_session_id, asyncio.Lock()):
            session = await self._open_named(request, seed)
        request.scope["state"]["token"] = session.token
        return json_response(
            {"resources_session_id": seed.resources_session_id} | self._build_tool_access(session, "resources_tools")
        )

    async def _open_named(self, request: Request, seed: SeedRequest) -> Session:
        unprompted: Row = {"responses_create_params": {"input": []}}
        row = self._parse_request(
            request, {**unprompted, **seed.task_data, ROLLOUT_ID_FIELD: seed.episode_id.rollout_id}
        )
        known = self._sessions.find_by_name(seed.resources_session_id)
        if known is not None and known.extras.get("seed") == seed and not _is_played(known):
            # Nothing has happened in between.
            return known
        # The prompt may go to the agent alone; then the row to be verified brings it.
        prompted, left = "responses_create_params" in seed.task_data, self._find_session(request)
        session = await self.episodes.open_session(
            row, "typed", name=seed.resources_session_id, left=left, prompted=prompted
        )
        session.extras["seed"] = seed
        return session

    def _parse_request(self, request: Request, row: Row) -> RowRequest:
        return parse_row_request(row, self._environment, rollout=request.scope["state"].get("rollout_id"))

    def _find_session(self, request: Request) -> Session | None:
        return self._sessions.find_by_token(request.scope["state"]["token"])

    def _build_tool_access(self, session: Session, key: str) -> Item:
        return {key: mcp.build_access(self._name, self._sessions.issue_key(session))} if self._with_mcp else {}

    def _build_verified_row(
        self, row: RowRequest, given_body: Row, judged: JudgedEpisode, used: Session | None, why: str | None
    ) -> Item:
        fields = judged.fields
        parts = {"reward_components": judged.components} if judged.components else {}
        ours = {
            "environment": self._environment.name,
            "seed": row.seed if used is None else used.extras["opening"].seed,
            "outcome": "scored",
            "ended": judged.ended,
            "verdict": list(fields),
        } | ({} if why is None else {"session_unused": why})
        return {
            **_echo_row(row, given_body),
            **UNMASKED_FIELDS,
            **fields,
            "reward": judged.reward,
            **parts,
            "gymsdk": ours,
        }


def _add_routes(made: FastAPI, server: ResourcesEndpoints) -> None:
    task = server.episodes.environment.task_type
    row, verified, typed = (
        build_row_schema(task),
        build_row_schema(task, response=RESPONSE_SCHEMA),
        SeedRequest.model_json_schema(),
    )
    seed = {"anyOf": [row, typed], "$defs": {**row.get("$defs", {}), **typed["$defs"]}}
    reward = {"type": "object", "properties": {TASK_INDEX: {"type": "integer"}, ROLLOUT_INDEX: {"type": "integer"}}}
    rewards = {"verify_responses": {"type": "array", "items": reward}}
    many = {"type": "object", "required": list(rewards), "properties": rewards}
    for path, endpoint, shape in (
        ("/seed_session", server.seed, seed),
        ("/close_session", server.close, CloseRequest.model_json_schema()),
        ("/verify", server.verify, verified),
        ("/aggregate_metrics", server.aggregate, many),
    ):
        made.add_api_route(path, endpoint, methods=["POST"], **document_endpoint(shape))
    made.add_api_route("/reverify_mode", server.mode, methods=["GET"])


def _echo_row(row: RowRequest, given_body: Row) -> Item:
    prompt = {key: given_body[key] for key in ("responses_create_params",) if key in given_body}
    return {**row.row, **prompt, "response": given_body["response"]}


def _build_unscored_row(row: RowRequest, given_body: Row, error: Unscorable) -> Item:
    told = {"mask_sample": True, "failure_kind": error.kind, "failure_reason": str(error)}
    return {**_echo_row(row, given_body), "reward": 0.0, **told, "_ng_failure_class": error.kind}


def _has_tool_call(items: Sequence[Item]) -> bool:
    return any(item.get("type") == "function_call" for item in items)


def _is_played(session: Session) -> bool:
    episode = session.sitting.episode
    return episode is not None and bool(episode.transcript.items)


def _describe_episode(row: RowRequest, session: Session) -> Item:
    """Give what our own clients are shown of an episode as it opens."""
    episode = session.sitting.episode
    if row.said is None or episode is None:
        return {}
    return {"gymsdk": {"seed": row.seed, "opening": episode.transcript.opening, "tools": episode.tools}}
