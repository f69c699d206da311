"""The environment server of NeMo Gym 0.7: a flat row or an episode request, played by the same loop as anywhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from fastapi import FastAPI, Request, Response

from gymsdk.errors import UsageError
from gymsdk.outcome import Failure
from gymsdk.servers.app import Overloaded, Refused, answer, body
from gymsdk.servers.app import app as bare
from gymsdk.servers.door.presence import while_there
from gymsdk.servers.door.routing import rollout_of
from gymsdk.servers.sessions.intake import Given, given
from gymsdk.servers.sessions.runs import AT_ONCE, QUEUE, Lost, Runs
from gymsdk.servers.watching.figures import Figures
from gymsdk.servers.wire import protocol
from gymsdk.servers.wire.bodies import read
from gymsdk.servers.wire.documents import FLAT, VERIFIED, documented
from gymsdk.servers.wire.protocol import EpisodeReply, EpisodeRequest, FlatReply, Reply
from gymsdk.sitting import Budget
from gymsdk.types import Model, Playable, Row

NAMED = "_environment_server"
"""What follows an environment's name in the name of its environment server."""


def app(
    environment: Playable,
    model: Model,
    *,
    name: str | None = None,
    budget: Budget | None = None,
    at_once: int = AT_ONCE,
    queue: int = QUEUE,
    figures: Figures | None = None,
) -> FastAPI:
    """Give the app of the environment server *name*: *environment* played with *model*, *at_once* episodes at most.

    *queue* more may wait for a place.
    """
    served = name or environment.name + NAMED
    figures = figures or Figures(served)
    runs = Runs(environment, model, budget=budget, at_once=at_once, queue=queue)
    figures.gauges["episodes_playing"] = lambda: runs.admission.taken
    figures.gauges["episodes_waiting"] = lambda: runs.admission.waiting
    ready = asyncio.Event()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with runs.open():
            ready.set()
            yield
        ready.clear()

    about = f"The environment server of {environment.name}: it plays flat rows and episode requests."
    made = bare(served, about, figures=figures, ready=ready.is_set, lifespan=lifespan)
    server = Episodic(runs)
    either = {"anyOf": [EpisodeRequest.model_json_schema(), FLAT]}
    either["$defs"] = either["anyOf"][0].pop("$defs")
    made.add_api_route("/run", server.run, methods=["POST"], **documented(either))
    made.add_api_route("/aggregate_metrics", server.aggregate, methods=["POST"], **documented(VERIFIED))
    return made


class Episodic:
    """The endpoints of an environment server that plays by *runs*."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs

    async def run(self, request: Request) -> Response:
        """Play a flat row or an episode request.

        A request that names its rollout is played once, even if it arrives more than once. A rollout without a reward
        is HTTP 200, as NeMo Gym's own environment servers answer: any other status ends the client's collection.
        """
        try:
            asked = await body(request)
        except Overloaded as error:
            return answer(FlatReply({}).failure(_failure(error)))
        episode = read(EpisodeRequest, asked) if protocol.is_episode(asked) else None
        reply: Reply = EpisodeReply(episode) if episode else FlatReply(asked)
        try:
            order = self._parse_episode_request(episode) if episode else self._parse_flat_row(asked, rollout_of(request.scope))
            return _json(await while_there(request, self._runs.play_once(order, asked, reply.result)))
        except Lost as lost:
            return answer(reply.failure(lost.failure, lost.rollout.response))
        except UsageError as error:
            return answer(reply.failure(Failure(stage="reset", kind="bad_row", message=str(error))))
        except Refused as error:
            return answer(reply.failure(_failure(error)))

    async def aggregate(self, request: Request) -> Response:
        """Give the figures over verified rows."""
        return answer(await self._runs.aggregate(await body(request)))

    def _parse_flat_row(self, row: Row, rollout: str | None) -> Given:
        found = given(row, self._runs.environment, rollout=rollout)
        return replace(found, id=protocol.rollout_id(row) or found.id)

    def _parse_episode_request(self, episode: EpisodeRequest) -> Given:
        found = given(protocol.row(episode), self._runs.environment, rollout=episode.episode_id.key)
        seconds = protocol.seconds(episode)
        if seconds is None:
            return found
        budget: Budget = found.budget or self._runs.budget
        return replace(found, budget=budget.model_copy(update={"seconds": seconds}))


def _failure(error: Refused) -> Failure:
    fields = {"stage": "reset", "kind": "bad_row", "message": str(error)} | error.fields
    return Failure.model_validate({key: value for key, value in fields.items() if key in Failure.model_fields})


def _json(text: bytes) -> Response:
    return Response(text, media_type="application/json")
