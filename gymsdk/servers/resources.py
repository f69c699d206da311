"""The resources server: serves one environment over HTTP with NeMo Gym's session, tool and verify episodes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from gymsdk.cluster.forwarding import ForwardingMiddleware, OtherInstances
from gymsdk.cluster.workers import Ownership
from gymsdk.config.model import DEFAULT_MAX_SESSIONS, DEFAULT_TTL_SECONDS
from gymsdk.edge.app import ServerApp
from gymsdk.edge.app import create_app as create_base_app
from gymsdk.edge.cookies import CookieMiddleware, cookie_name
from gymsdk.edge.openapi import RESPONSE_SCHEMA, build_row_schema, document_endpoint
from gymsdk.environment import Environment
from gymsdk.line import ROLLOUT_INDEX, TASK_INDEX
from gymsdk.observability.metrics import ServerMetrics, add_wait_metrics
from gymsdk.servers import gymnasium, tool_calls
from gymsdk.servers.episodes import EpisodeService
from gymsdk.servers.requests import CloseRequest, SeedRequest
from gymsdk.servers.sessions import Session, SessionStore
from gymsdk.types import Budget
from gymsdk.workers.offload import count_waiting_calls
from gymsdk.workers.resource_waits import GRADINGS


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
    episodes = EpisodeService(environment, sessions, budget, name=server_name, with_mcp=with_mcp, owners=owners)
    _add_routes(app, episodes)
    gymnasium.add_routes(app, episodes)
    if with_mcp:
        tool_calls.mcp_add_routes(app, episodes, server_name)
    tool_calls.add_routes(app, episodes)
    return app


def _add_routes(app: ServerApp, episodes: EpisodeService) -> None:
    task = episodes.environment.task_type
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
        ("/seed_session", episodes.seed, seed_schema),
        ("/close_session", episodes.close, CloseRequest.model_json_schema()),
        ("/verify", episodes.verify, verify_schema),
        ("/aggregate_metrics", episodes.aggregate, aggregate),
    ):
        app.add_post(path, endpoint, **document_endpoint(schema))
    app.add_api_route("/reverify_mode", episodes.mode, methods=["GET"])
