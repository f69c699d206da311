"""The agent server: rows played against one environment by one model, and requests answered with a session's tools."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Protocol, runtime_checkable

from fastapi import FastAPI, Request, Response

from gymsdk import http, jars, usage
from gymsdk.rollouts import jobs
from gymsdk.servers.app import Refused, answer, body
from gymsdk.servers.app import app as bare
from gymsdk.servers.door.cookies import named
from gymsdk.servers.door.routing import rollout_of
from gymsdk.servers.sessions import engagements, visits
from gymsdk.servers.sessions.engagements import Closing, Engagement, Engagements, Opening
from gymsdk.servers.sessions.intake import given
from gymsdk.servers.sessions.runs import AT_ONCE, QUEUE, Runs, told
from gymsdk.servers.watching.figures import Figures
from gymsdk.servers.wire.bodies import read
from gymsdk.servers.wire.calling import Line
from gymsdk.servers.wire.documents import FLAT, PROMPT, VERIFIED, documented
from gymsdk.sitting import Budget
from gymsdk.transcript import Item
from gymsdk.types import AGENT, Model, Playable, Row


def app(
    environment: Playable,
    model: Model,
    *,
    resources: Lines | None = None,
    name: str | None = None,
    budget: Budget | None = None,
    at_once: int = AT_ONCE,
    queue: int = QUEUE,
    figures: Figures | None = None,
) -> FastAPI:
    """Give the app of the agent *name* that plays *environment* with *model*, *at_once* episodes at most.

    *queue* more may wait for a place. The environment is one of this process, a `Remote`, or a `Spread`; *resources* is
    where its sessions are, for `/v1/responses` alone.
    """
    served = name or environment.name + AGENT
    figures = figures or Figures(served)
    runs = Runs(environment, model, budget=budget, at_once=at_once, queue=queue)
    agent = Agent(served, runs, resources or (environment if isinstance(environment, Lines) else None))
    figures.gauges["episodes_playing"] = lambda: runs.admission.taken
    figures.gauges["episodes_waiting"] = lambda: runs.admission.waiting
    figures.gauges["agent_sessions_open"] = lambda: len(agent.engagements)
    ready = asyncio.Event()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with runs.open(), agent.engagements.sweep_periodically():
            ready.set()
            yield
        ready.clear()

    about = f"The agent of the environment {environment.name}: it plays rows, and answers requests with tools."
    made = bare(served, about, figures=figures, ready=ready.is_set, lifespan=lifespan)
    _route(made, agent)
    return made


@runtime_checkable
class Lines(Protocol):
    """Where sessions are: one resources server, or several."""

    def open_connection(self, jar: Mapping[str, str] | None = None) -> Line | Awaitable[Line]:
        """Give a line to the session that the cookies in *jar* are for."""

    def auth_headers(self, base_url: str) -> http.Headers:
        """Give what requests to *base_url* carry: the token where that is one of these."""


class Agent:
    """The endpoints of the agent *name*: it plays by *runs*; *resources* is where its callers have their sessions."""

    def __init__(self, name: str, runs: Runs, resources: Lines | None) -> None:
        self.engagements = Engagements()
        self._name = name
        self._runs = runs
        self._resources = resources
        self._cookie = named("Agent", name)

    async def run(self, request: Request) -> Response:
        """Play a row and give its rollout's line; one that names its rollout is played once, however often it comes."""
        row = await body(request)
        self._check_agent_ref(row)
        order = given(row, self._runs.environment, rollout=rollout_of(request.scope))
        return Response(await told(request, self._runs.play_once(order, row)), media_type="application/json")

    async def respond(self, request: Request) -> Response:
        """Answer a Responses request, its tools called in the session whose cookies the request carries."""
        asked = await body(request)
        jar = jars.read(request.headers.get("cookie"))
        engagement = self.engagements.find_by_token(jar.get(self._cookie))
        line = engagement.line if engagement else await self._open_connection(asked, jar)
        said = await told(request, visits.answered(self._runs, asked, line, id=rollout_of(request.scope) or ""))
        response = answer(usage.whole(said))
        if engagement is not None:
            return self._with_token(response, engagement)
        return _with_cookies(response, line.jar if line else {})

    async def open(self, request: Request) -> Response:
        """Open an agent session; the same asked for again is the same session."""
        opening = read(Opening, await body(request))
        engagement = self.engagements.open(opening, engagements.line(opening, self._auth_headers))
        return self._with_token(answer({"agent_session_id": opening.agent_session_id}), engagement)

    async def close(self, request: Request) -> Response:
        """Close an agent session; one that is none is closed from then on."""
        closing = read(Closing, await body(request))
        jar = self.engagements.close(closing)
        return answer(
            {"agent_session_id": closing.agent_session_id, "agent_observations": None, "resources_cookies": jar}
        )

    async def aggregate(self, request: Request) -> Response:
        """Give the figures over verified rows."""
        return answer(await self._runs.aggregate(await body(request)))

    def _check_agent_ref(self, row: Row) -> None:
        """Refuse a *row* that names another agent than this one."""
        name = jobs.agent(row)
        if name not in {None, self._name} and jobs.route(row) != self._runs.environment.name:
            whose = f"the row is for the agent {name!r}, and this is {self._name!r}"
            raise Refused(422, f"{whose}; send it there, or mend its `agent_ref`")

    def _auth_headers(self, base_url: str) -> http.Headers:
        # Whoever opens a session names the server of its tools: our token is for none but our own.
        return self._resources.auth_headers(base_url) if self._resources else {}

    async def _open_connection(self, asked: Item, jar: jars.Jar) -> Line | None:
        if self._resources is None and asked.get("tools"):
            raise Refused(422, "this agent has no resources server whose tools it could call; leave `tools` out")
        line = self._resources.open_connection(jar) if self._resources else None
        return line if line is None or isinstance(line, Line) else await line

    def _with_token(self, response: Response, engagement: Engagement) -> Response:
        return _with_cookies(response, {self._cookie: engagement.token})


def _with_cookies(response: Response, jar: Mapping[str, str]) -> Response:
    for name, value in jar.items():
        response.headers.append("set-cookie", f"{name}={value}; Path=/; HttpOnly; SameSite=lax")
    return response


def _route(made: FastAPI, agent: Agent) -> None:
    endpoints: tuple[tuple[str, Callable[[Request], Awaitable[Response]], Item], ...] = (
        ("/run", agent.run, FLAT),
        ("/v1/responses", agent.respond, PROMPT),
        ("/v1/agent_sessions", agent.open, Opening.model_json_schema()),
        ("/v1/agent_sessions/close", agent.close, Closing.model_json_schema()),
        ("/aggregate_metrics", agent.aggregate, VERIFIED),
    )
    for path, endpoint, shape in endpoints:
        made.add_api_route(path, endpoint, methods=["POST"], **documented(shape))
