"""The agent server: rows played against one environment by one model, and requests answered with a session's tools."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

from fastapi import FastAPI, Request, Response

from gymsdk import responses, types
from gymsdk.environment import Environment
from gymsdk.episode import Budget, play
from gymsdk.errors import EpisodeError, Failed, Unscorable
from gymsdk.http import client
from gymsdk.jsonl import dump_json
from gymsdk.metrics import ROLLOUT_INDEX, TASK_INDEX
from gymsdk.observability.metrics import ServerMetrics
from gymsdk.rollouts import folder, jobs
from gymsdk.servers import agent_sessions
from gymsdk.servers.admission import EpisodeSlots
from gymsdk.servers.agent_sessions import AgentSession, AgentSessions, CloseAgentSession, OpenAgentSession
from gymsdk.servers.aggregates import aggregate_rows
from gymsdk.servers.app import (
    AGGREGATE_SCHEMA,
    FLAT_ROW_SCHEMA,
    PROMPT_SCHEMA,
    RequestRejected,
    document_endpoint,
    json_response,
    read_json_object,
)
from gymsdk.servers.app import create_app as bare
from gymsdk.servers.auth import cookie_name
from gymsdk.servers.idempotency import IdempotencyCache
from gymsdk.servers.middleware import cancel_on_disconnect
from gymsdk.servers.requests import (
    NUMBERED_ROLLOUT_PATTERN,
    RowRequest,
    digest_row,
    limit_budget,
    parse_body,
    parse_row_request,
    play_without_nulls,
)
from gymsdk.servers.routing import rollout_id_of
from gymsdk.servers.tool_calls import SessionConnection, call_tool
from gymsdk.types import (
    AGENT_SUFFIX,
    UNMASKED_FIELDS,
    Action,
    Episode,
    Failure,
    Item,
    Message,
    Model,
    Playable,
    Rollout,
    Row,
    Step,
    Task,
    Transcript,
    Verdict,
)

T = TypeVar("T")

LineFormatter: TypeAlias = Callable[[Row, Rollout], object]
"""Makes the body of an answer out of a rollout's line and the rollout."""

MAX_CONCURRENT_EPISODES = 4096
"""Episodes that one server plays at once where it is not told otherwise: clients of NeMo Gym send all rows at once."""

MAX_QUEUED_EPISODES = 3 * MAX_CONCURRENT_EPISODES
"""Episodes that may wait for a place."""

INDEX_FIELDS = (TASK_INDEX, ROLLOUT_INDEX)


@runtime_checkable
class Aggregator(Protocol):
    """An environment elsewhere that makes its own figures."""

    async def aggregate(self, body: Row) -> Item:
        """Give the figures over the verified rows in *body*; raises `Refused`."""


class RolloutFailed(Exception):
    """A rollout that has no reward."""

    def __init__(self, rollout: Rollout, failure: Failure) -> None:
        super().__init__(failure.message)
        self.rollout = rollout
        self.failure = failure

    def to_error(self) -> EpisodeError:
        """Give it as the error it comes from."""
        into = Unscorable if self.rollout.outcome == "unscorable" else Failed
        return into(
            self.failure.message,
            kind=self.failure.kind,
            retryable=self.failure.retryable,
            stage=self.failure.stage,
            retry_after=(self.failure.retry_after or 1.0) if self.failure.retryable else None,
        )


def unchanged_line(line: Row, _: Rollout) -> object:
    """Return a rollout's *line* as it is."""
    return line


class RunService:
    """Plays rows of *environment* with *model*: *at_once* at most, within *budget*, whatever a row says.

    *queue* more rows may wait for a place.
    """

    def __init__(
        self,
        environment: Playable,
        model: Model,
        *,
        budget: Budget | None = None,
        at_once: int = MAX_CONCURRENT_EPISODES,
        queue: int = MAX_QUEUED_EPISODES,
    ) -> None:
        self.environment = environment
        self.model = model
        self.budget = budget or Budget()
        self.admission = EpisodeSlots(at_once, queue)
        self._once = IdempotencyCache()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Hold the environment open, where it is one of this process: what is being played ends before it does."""
        environment = self.environment
        async with environment if isinstance(environment, AbstractAsyncContextManager) else nullcontext():
            try:
                yield
            finally:
                await self._once.aclose()

    async def play_to_json(self, given: RowRequest, shape: LineFormatter = unchanged_line) -> bytes:
        """Give the line of the *given* row's rollout, in this *shape*, as JSON.

        Raises `Lost` where it has no reward, `BadRow` where the row does not fit, `Overloaded` where there is no place.
        """
        row = {key: value for key, value in given.row.items() if key not in UNMASKED_FIELDS}
        stamps = {key: row.pop(key) for key in INDEX_FIELDS if key in row}
        async with self.admission.place():
            rollout = await play_without_nulls(
                row, lambda each: self._play_row(given, each, given.id or _rollout_id(stamps))
            )
        if rollout.failure is not None:
            raise RolloutFailed(rollout, rollout.failure)
        try:
            return dump_json(shape(_rollout_to_row(rollout) | stamps, rollout))
        except (TypeError, ValueError, RecursionError) as error:
            failure = Failure(stage="verify", kind="bad_answer", message=f"it cannot be written as JSON: {error}")
            raise RolloutFailed(rollout, failure) from error

    async def _play_row(self, given: RowRequest, row: Row, id: str) -> Rollout:
        budget = limit_budget(given.budget, self.budget)
        return await play(self.environment, self.model, row, seed=given.seed, repeat=given.repeat, id=id, budget=budget)

    async def play_once(self, given: RowRequest, body: Row, shape: LineFormatter = unchanged_line) -> bytes:
        """Give what `answered` gives; a *body* that names its rollout is played once, however often it comes.

        Another row under the same id, or another attempt at it, is something else.
        """
        if not given.id:
            return await self.play_to_json(given, shape)
        key = f"{given.id}:{digest_row(body)}"
        keep = not NUMBERED_ROLLOUT_PATTERN.fullmatch(given.id)
        return await self._once(key, lambda: self.play_to_json(given, shape), keep=keep)

    async def aggregate(self, body: Row) -> Item:
        """Give the figures over the verified rows in *body*; raises `Refused`."""
        if isinstance(self.environment, Aggregator):
            return await self.environment.aggregate(body)
        if not isinstance(self.environment, Environment):
            raise RequestRejected(422, "the environment is served elsewhere: POST this to its resources server")
        return await aggregate_rows(self.environment, body)


async def cancel_if_client_leaves(request: Request, playing: Coroutine[Any, Any, T]) -> T:
    """Give what comes of *playing* as long as the client of *request* waits for it.

    A lost rollout is raised as the error it comes from.
    """
    try:
        return await cancel_on_disconnect(request, playing)
    except RolloutFailed as lost:
        raise lost.to_error() from None


def _rollout_id(stamps: Row) -> str:
    task, repeat = stamps.get(TASK_INDEX), stamps.get(ROLLOUT_INDEX) or 0
    return responses.generate_id("rollout") if task is None else f"{task}:{repeat}"


def _rollout_to_row(rollout: Rollout) -> Row:
    line = folder.scored(rollout, (0, rollout.repeat))
    told = {name: value for name, value in line.items() if name not in INDEX_FIELDS}
    return told | {name: value for name, value in UNMASKED_FIELDS.items() if name not in told}


class CallerSession:
    """The session at the other end of *line*, as far as it is played from here: its tools are called, no more.

    Without a line there are no tools.
    """

    def __init__(self, name: str, line: SessionConnection | None) -> None:
        self.name = name
        self._line = line

    async def reset(
        self, row: Row | Task, *, seed: int = 0, id: str = "", repeat: int = 0, deadline: float | None = None
    ) -> Episode:
        """Give the episode that the request in *row* goes on with."""
        task = row if isinstance(row, Task) else Task.model_validate(row)
        params = task.responses_create_params
        return Episode(
            id=id,
            seed=seed,
            task=task,
            row=task.row(),
            environment=self,
            transcript=Transcript(opening=task.input),
            tools=(params.get("tools") or []) if self._line else [],
            repeat=repeat,
            deadline=deadline,
        )

    async def step(self, episode: Episode, action: Action) -> Step:
        """Call a tool; a plain reply ends the visit."""
        if isinstance(action, Message):
            return Step(done=True)
        assert self._line is not None, "only a tool on offer is called"
        return await call_tool(self._line, action, episode.tools, deadline=episode.deadline)

    async def verify(self, episode: Episode) -> Verdict:  # noqa: ARG002 - nothing of it is judged here
        """Give a verdict nobody reads: the caller has the response judged."""
        return Verdict(reward=0.0)

    async def close(self, episode: Episode) -> None:
        """Leave the session as it is."""


async def answer_request(runs: RunService, request: Item, line: SessionConnection | None, *, id: str) -> Item:
    """Give the Response to *request*, all new items its output; raises `Lost`, and `Refused` where it is none."""
    body = {key: value for key, value in request.items() if key not in {"stream", "stream_options"}}
    try:
        task = Task.model_validate({"responses_create_params": body})
    except ValueError:
        raise RequestRejected(422, "`input` must be a string or a list of items, `tools` a list of tools") from None
    async with runs.admission.place():
        visit = CallerSession(runs.environment.name, line)
        rollout = await play(visit, runs.model, task, id=id or responses.generate_id("rollout"), budget=runs.budget)
    if rollout.failure is not None:
        raise RolloutFailed(rollout, rollout.failure)
    return rollout.response or responses.build_response([], model="", status="incomplete", request=body)


def create_app(
    environment: Playable,
    model: Model,
    *,
    resources: SessionLocator | None = None,
    name: str | None = None,
    budget: Budget | None = None,
    at_once: int = MAX_CONCURRENT_EPISODES,
    queue: int = MAX_QUEUED_EPISODES,
    figures: ServerMetrics | None = None,
) -> FastAPI:
    """Give the app of the agent *name* that plays *environment* with *model*, *at_once* episodes at most.

    *queue* more may wait for a place. The environment is one of this process, a `Remote`, or a `Spread`; *resources* is
    where its sessions are, for `/v1/responses` alone.
    """
    served = name or environment.name + AGENT_SUFFIX
    figures = figures or ServerMetrics(served)
    runs = RunService(environment, model, budget=budget, at_once=at_once, queue=queue)
    agent = AgentEndpoints(
        served, runs, resources or (environment if isinstance(environment, SessionLocator) else None)
    )
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
    _add_routes(made, agent)
    return made


@runtime_checkable
class SessionLocator(Protocol):
    """Where sessions are: one resources server, or several."""

    def open_connection(self, jar: Mapping[str, str] | None = None) -> SessionConnection | Awaitable[SessionConnection]:
        """Give a line to the session that the cookies in *jar* are for."""

    def auth_headers(self, base_url: str) -> client.Headers:
        """Give what requests to *base_url* carry: the token where that is one of these."""


class AgentEndpoints:
    """The endpoints of the agent *name*: it plays by *runs*; *resources* is where its callers have their sessions."""

    def __init__(self, name: str, runs: RunService, resources: SessionLocator | None) -> None:
        self.engagements = AgentSessions()
        self._name = name
        self._runs = runs
        self._resources = resources
        self._cookie = cookie_name("Agent", name)

    async def run(self, request: Request) -> Response:
        """Play a row and give its rollout's line; one that names its rollout is played once, however often it comes."""
        row = await read_json_object(request)
        self._check_agent_ref(row)
        order = parse_row_request(row, self._runs.environment, rollout=rollout_id_of(request.scope))
        return Response(
            await cancel_if_client_leaves(request, self._runs.play_once(order, row)), media_type="application/json"
        )

    async def respond(self, request: Request) -> Response:
        """Answer a Responses request, its tools called in the session whose cookies the request carries."""
        asked = await read_json_object(request)
        jar = client.parse_cookies(request.headers.get("cookie"))
        engagement = self.engagements.find_by_token(jar.get(self._cookie))
        line = engagement.line if engagement else await self._open_connection(asked, jar)
        said = await cancel_if_client_leaves(
            request, answer_request(self._runs, asked, line, id=rollout_id_of(request.scope) or "")
        )
        response = json_response(types.fill_usage_details(said))
        if engagement is not None:
            return self._with_token(response, engagement)
        return _set_cookies(response, line.jar if line else {})

    async def open(self, request: Request) -> Response:
        """Open an agent session; the same asked for again is the same session."""
        opening = parse_body(OpenAgentSession, await read_json_object(request))
        engagement = self.engagements.open(opening, agent_sessions.connect_to_tools(opening, self._auth_headers))
        return self._with_token(json_response({"agent_session_id": opening.agent_session_id}), engagement)

    async def close(self, request: Request) -> Response:
        """Close an agent session; one that is none is closed from then on."""
        closing = parse_body(CloseAgentSession, await read_json_object(request))
        jar = self.engagements.close(closing)
        return json_response(
            {"agent_session_id": closing.agent_session_id, "agent_observations": None, "resources_cookies": jar}
        )

    async def aggregate(self, request: Request) -> Response:
        """Give the figures over verified rows."""
        return json_response(await self._runs.aggregate(await read_json_object(request)))

    def _check_agent_ref(self, row: Row) -> None:
        """Refuse a *row* that names another agent than this one."""
        name = jobs.agent(row)
        if name not in {None, self._name} and jobs.route(row) != self._runs.environment.name:
            whose = f"the row is for the agent {name!r}, and this is {self._name!r}"
            raise RequestRejected(422, f"{whose}; send it there, or mend its `agent_ref`")

    def _auth_headers(self, base_url: str) -> client.Headers:
        # Whoever opens a session names the server of its tools: our token is for none but our own.
        return self._resources.auth_headers(base_url) if self._resources else {}

    async def _open_connection(self, asked: Item, jar: client.Cookies) -> SessionConnection | None:
        if self._resources is None and asked.get("tools"):
            raise RequestRejected(
                422, "this agent has no resources server whose tools it could call; leave `tools` out"
            )
        line = self._resources.open_connection(jar) if self._resources else None
        return line if line is None or isinstance(line, SessionConnection) else await line

    def _with_token(self, response: Response, engagement: AgentSession) -> Response:
        return _set_cookies(response, {self._cookie: engagement.token})


def _set_cookies(response: Response, jar: Mapping[str, str]) -> Response:
    for name, value in jar.items():
        response.headers.append("set-cookie", f"{name}={value}; Path=/; HttpOnly; SameSite=lax")
    return response


def _add_routes(made: FastAPI, agent: AgentEndpoints) -> None:
    endpoints: tuple[tuple[str, Callable[[Request], Awaitable[Response]], Item], ...] = (
        ("/run", agent.run, FLAT_ROW_SCHEMA),
        ("/v1/responses", agent.respond, PROMPT_SCHEMA),
        ("/v1/agent_sessions", agent.open, OpenAgentSession.model_json_schema()),
        ("/v1/agent_sessions/close", agent.close, CloseAgentSession.model_json_schema()),
        ("/aggregate_metrics", agent.aggregate, AGGREGATE_SCHEMA),
    )
    for path, endpoint, shape in endpoints:
        made.add_api_route(path, endpoint, methods=["POST"], **document_endpoint(shape))
