"""The turns of an episode over HTTP, as NeMo Gym's Gymnasium-style servers have them: `/reset`, `/step`, `/close`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fastapi import FastAPI, Request, Response

from gymsdk.episode import TurnResult
from gymsdk.errors import EpisodeError, Failed, Unscorable, convert_error
from gymsdk.servers import tool_calls as tools
from gymsdk.servers.app import (
    RESPONSE_SCHEMA,
    RequestRejected,
    build_row_schema,
    document_endpoint,
    json_response,
    read_json_object,
)
from gymsdk.servers.episodes import EpisodeService
from gymsdk.servers.requests import parse_response, parse_row_request
from gymsdk.servers.sessions import Session
from gymsdk.types import Item, Verdict, extract_text, iter_tool_calls

REQUEST_ID_FIELD = "_ng_step_request_id"
"""How a client names one step, so that the same sent twice is taken once."""

CAPABILITIES = {"supports_explicit_close": True, "supports_step_idempotency": True}


def add_routes(made: FastAPI, episodes: EpisodeService) -> None:
    """Add the routes to *made*."""
    turns = TurnEndpoints(episodes)
    row = build_row_schema(episodes.environment.task_type)
    turn = {"type": "object", "required": ["response"], "properties": {"response": RESPONSE_SCHEMA}}
    made.add_api_route("/reset", turns.reset, methods=["POST"], **document_endpoint(row))
    made.add_api_route("/step", turns.step, methods=["POST"], **document_endpoint(turn))
    made.add_api_route("/close", turns.close, methods=["POST"], **document_endpoint({"type": "object"}, required=False))


@dataclass(slots=True)
class Turn:
    """The last turn of a session: its *request*, what came of it, and the answer once there is one."""

    request: str | None
    effects: TurnResult = field(default_factory=TurnResult)
    answer: Item | None = None
    failure: EpisodeError | None = None

    @property
    def is_open(self) -> bool:
        """Whether it was taken and only its verdict failed: that alone is asked for again."""
        return self.answer is None and self.failure is None


class TurnEndpoints:
    """The endpoints of episodes that are played turn by turn."""

    def __init__(self, episodes: EpisodeService) -> None:
        self._episodes = episodes

    async def reset(self, request: Request) -> Response:
        """Open an episode of a row; its cookie is in the answer."""
        row = parse_row_request(
            await read_json_object(request),
            self._episodes.environment,
            rollout=request.scope["state"].get("rollout_id"),
        )
        session = await self._episodes.open_session(row, "turns", left=self._find_session(request))
        request.scope["state"]["token"] = session.token
        episode = session.sitting.episode
        assert episode is not None, "it has been opened"
        said = episode.transcript.opening[len(episode.task.input) :]
        return json_response({"observation": _messages_to_text(said), "info": {**CAPABILITIES, "tools": episode.tools}})

    async def step(self, request: Request) -> Response:
        """Answer one turn of the policy; the last one's reward has the verdict in it."""
        turn = await read_json_object(request)
        response, name = parse_response(turn), turn.get(REQUEST_ID_FIELD)
        if name is not None and not isinstance(name, str):
            raise RequestRejected(422, f"`{REQUEST_ID_FIELD}` must be a string")
        async with self._episodes.lock_playing_session(self._find_session(request), "turns") as session:
            return json_response(await _play_turn(session, response, name))

    async def close(self, request: Request) -> Response:
        """Close the episode; one there is none of has been closed."""
        await read_json_object(request)
        session = self._find_session(request)
        if session is not None:
            trusted = session.extras["face"] == "turns" or tools.CLIENT_HEADER in request.headers
            await self._episodes.leave_session(session, trusted=trusted)
            if session.sitting.close_error is not None:
                raise session.sitting.close_error
        return json_response({})

    def _find_session(self, request: Request) -> Session | None:
        return self._episodes.sessions.find_by_token(request.scope["state"]["token"])


async def _play_turn(session: Session, response: Item, name: str | None) -> Item:
    turn: Turn | None = session.extras.get("turn")
    if turn is None or not turn.is_open:
        again = turn is not None and name is not None and turn.request == name
        if turn is None or not again:
            turn = await _begin_turn(session, response, name)
    if turn.failure is not None:
        # Another each time: one that is raised again gathers the traces of all the requests.
        failure = turn.failure
        raise convert_error(failure, Unscorable) if isinstance(failure, Unscorable) else convert_error(failure, Failed)
    if turn.answer is None:
        turn.answer = await _build_answer(session, turn.effects)
    return turn.answer


async def _begin_turn(session: Session, response: Item, name: str | None) -> Turn:
    """Take a turn that has not been sent before; one that failed half way is not taken a second time."""
    if session.sitting.is_over:
        raise RequestRejected(409, "the episode is over: POST /reset for another")
    turn = Turn(name)
    session.calls += iter_tool_calls(response["output"])
    try:
        turn.effects = await session.sitting.apply_response(response)
    except EpisodeError as error:
        turn.failure = error
    session.extras["turn"] = turn
    return turn


async def _build_answer(session: Session, taken: TurnResult) -> Item:
    outputs = [item for item in taken.items if item.get("type") == "function_call_output"]
    info: Item = {"tool_outputs": [{"call_id": item["call_id"], "output": item["output"]} for item in outputs]}
    reward = taken.reward
    if taken.ended is not None:
        await session.sitting.verify()
        verdict = session.sitting.result
        assert isinstance(verdict, Verdict), "it has been judged"
        reward += verdict.reward
        info |= verdict.model_dump(mode="json", exclude={"reward", "components"})
        info |= {"ended": taken.ended, "reward_components": session.sitting.build_rollout().components}
    return {
        "observation": _messages_to_text([item for item in taken.items if item.get("type") == "message"]),
        "reward": reward,
        "terminated": taken.ended == "done",
        "truncated": taken.ended not in {None, "done"},
        "info": info,
    }


def _messages_to_text(messages: Sequence[Item]) -> str | None:
    """Give what *messages* say as one text, which is all that this wire has a place for."""
    return "\n\n".join(filter(None, (extract_text(message.get("content")) for message in messages))) or None
