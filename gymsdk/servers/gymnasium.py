"""The `/reset`, `/step` and `/close` endpoints of NeMo Gym's Gymnasium-style servers, which play turn by turn."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import Request, Response

from gymsdk.edge.app import ServerApp
from gymsdk.edge.errors import RequestRejected
from gymsdk.edge.openapi import RESPONSE_SCHEMA, build_row_schema, document_endpoint
from gymsdk.edge.request import get_state, json_response, read_json_object
from gymsdk.episode import TurnResult
from gymsdk.errors import EpisodeError, Failed, Unscorable, convert_error
from gymsdk.servers.episodes import EpisodeService
from gymsdk.servers.requests import parse_response
from gymsdk.servers.session_clients import CLIENT_HEADER
from gymsdk.servers.sessions import Session, Turn
from gymsdk.types import Item, Verdict, extract_text, iter_tool_calls

REQUEST_ID_FIELD = "_ng_step_request_id"
"""Field with which a client names a step, so that a repeated request is not played twice."""

CAPABILITIES = {"supports_explicit_close": True, "supports_step_idempotency": True}


def add_routes(app: ServerApp, episodes: EpisodeService) -> None:
    """Add the endpoints to an app."""
    turns = TurnEndpoints(episodes)
    row_schema = build_row_schema(episodes.environment.task_type)
    step_schema = {"type": "object", "required": ["response"], "properties": {"response": RESPONSE_SCHEMA}}
    app.add_post("/reset", turns.reset, **document_endpoint(row_schema))
    app.add_post("/step", turns.step, **document_endpoint(step_schema))
    app.add_post("/close", turns.close, **document_endpoint({"type": "object"}, required=False))


class TurnEndpoints:
    """The endpoints of episodes that are played turn by turn."""

    def __init__(self, episodes: EpisodeService) -> None:
        self._episodes = episodes

    async def reset(self, request: Request) -> Response:
        """Open an episode of a row; the response sets its cookie."""
        row_request = self._episodes.parse_row(request, await read_json_object(request))
        session = await self._episodes.open_session(row_request, "turns", previous=self._episodes.find_session(request))
        get_state(request.scope).token = session.token
        episode = session.episode
        messages = episode.transcript.opening[len(episode.task.input) :]
        return json_response(
            {"observation": _messages_to_text(messages), "info": {**CAPABILITIES, "tools": episode.tools}}
        )

    async def step(self, request: Request) -> Response:
        """Play one turn of the policy; the reward of the last turn includes the verdict."""
        content = await read_json_object(request)
        response, step_id = parse_response(content), content.get(REQUEST_ID_FIELD)
        if step_id is not None and not isinstance(step_id, str):
            raise RequestRejected(422, f"`{REQUEST_ID_FIELD}` must be a string")
        async with self._episodes.lock_playing_session(self._episodes.find_session(request), "turns") as session:
            return json_response(await _play_turn(session, response, step_id))

    async def close(self, request: Request) -> Response:
        """Close the episode; closing it twice is no error."""
        await read_json_object(request)
        session = self._episodes.find_session(request)
        if session is not None:
            trusted = session.kind == "turns" or CLIENT_HEADER in request.headers
            await self._episodes.leave_session(session, trusted=trusted)
        return json_response({})


async def _play_turn(session: Session, response: Item, step_id: str | None) -> Item:
    turn = session.turn
    if turn is None or not turn.is_open:
        is_repeated = turn is not None and step_id is not None and turn.request == step_id
        if turn is None or not is_repeated:
            turn = await _begin_turn(session, response, step_id)
    if turn.failure is not None:
        # A new exception each time: raising the same one again would collect the tracebacks of all requests.
        failure = turn.failure
        raise convert_error(failure, Unscorable) if isinstance(failure, Unscorable) else convert_error(failure, Failed)
    if turn.answer is None:
        turn.answer = await _build_answer(session, turn.effects)
    return turn.answer


async def _begin_turn(session: Session, response: Item, step_id: str | None) -> Turn:
    """Play a new turn; a turn that failed is not played again."""
    if session.runner.is_over:
        raise RequestRejected(409, "the episode is over: POST /reset to start another")
    turn = Turn(step_id)
    session.calls += iter_tool_calls(response["output"])
    try:
        turn.effects = await session.runner.apply_response(response)
    except EpisodeError as error:
        turn.failure = error
    session.turn = turn
    return turn


async def _build_answer(session: Session, effects: TurnResult) -> Item:
    outputs = [item for item in effects.items if item.get("type") == "function_call_output"]
    info: Item = {"tool_outputs": [{"call_id": item["call_id"], "output": item["output"]} for item in outputs]}
    reward = effects.reward
    if effects.ended is not None:
        await session.runner.verify()
        verdict = session.runner.result
        assert isinstance(verdict, Verdict), "the episode was judged"
        reward += verdict.reward
        info |= verdict.model_dump(mode="json", exclude={"reward", "components"})
        info |= {"ended": effects.ended, "reward_components": session.runner.build_rollout().components}
    return {
        "observation": _messages_to_text([item for item in effects.items if item.get("type") == "message"]),
        "reward": reward,
        "terminated": effects.ended == "done",
        "truncated": effects.ended not in {None, "done"},
        "info": info,
    }


def _messages_to_text(messages: Sequence[Item]) -> str | None:
    """Join the messages' text: the observation is a single string."""
    return "\n\n".join(filter(None, (extract_text(message.get("content")) for message in messages))) or None
