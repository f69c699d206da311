"""The turns of an episode over HTTP, as NeMo Gym's Gymnasium-style servers have them: `/reset`, `/step`, `/close`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fastapi import FastAPI, Request, Response

from gymsdk.errors import EpisodeError, Failed, Unscorable, recast
from gymsdk.servers.app import Refused, answer, body
from gymsdk.servers.sessions.episodes import Episodes
from gymsdk.servers.sessions.held import Session
from gymsdk.servers.sessions.intake import given, response_of
from gymsdk.servers.wire import tools
from gymsdk.servers.wire.documents import RESPONSE, documented, row_of
from gymsdk.sitting import Taken
from gymsdk.transcript import Item, text_of, tool_calls
from gymsdk.types import Verdict

REQUEST = "_ng_step_request_id"
"""How a client names one step, so that the same sent twice is taken once."""

OFFERED = {"supports_explicit_close": True, "supports_step_idempotency": True}


def route(made: FastAPI, episodes: Episodes) -> None:
    """Add the routes to *made*."""
    turns = Turns(episodes)
    row = row_of(episodes.environment.task_type)
    turn = {"type": "object", "required": ["response"], "properties": {"response": RESPONSE}}
    made.add_api_route("/reset", turns.reset, methods=["POST"], **documented(row))
    made.add_api_route("/step", turns.step, methods=["POST"], **documented(turn))
    made.add_api_route("/close", turns.close, methods=["POST"], **documented({"type": "object"}, required=False))


@dataclass(slots=True)
class Turn:
    """The last turn of a session: its *request*, what came of it, and the answer once there is one."""

    request: str | None
    effects: Taken = field(default_factory=Taken)
    answer: Item | None = None
    failure: EpisodeError | None = None

    @property
    def is_open(self) -> bool:
        """Whether it was taken and only its verdict failed: that alone is asked for again."""
        return self.answer is None and self.failure is None


class Turns:
    """The endpoints of episodes that are played turn by turn."""

    def __init__(self, episodes: Episodes) -> None:
        self._episodes = episodes

    async def reset(self, request: Request) -> Response:
        """Open an episode of a row; its cookie is in the answer."""
        row = given(await body(request), self._episodes.environment, rollout=request.scope["state"].get("rollout_id"))
        session = await self._episodes.open_session(row, "turns", left=self._find_session(request))
        request.scope["state"]["token"] = session.token
        episode = session.sitting.episode
        assert episode is not None, "it has been opened"
        said = episode.transcript.opening[len(episode.task.input) :]
        return answer({"observation": _observed(said), "info": {**OFFERED, "tools": episode.tools}})

    async def step(self, request: Request) -> Response:
        """Answer one turn of the policy; the last one's reward has the verdict in it."""
        turn = await body(request)
        response, name = response_of(turn), turn.get(REQUEST)
        if name is not None and not isinstance(name, str):
            raise Refused(422, f"`{REQUEST}` must be a string")
        async with self._episodes.lock_playing_session(self._find_session(request), "turns") as session:
            return answer(await _stepped(session, response, name))

    async def close(self, request: Request) -> Response:
        """Close the episode; one there is none of has been closed."""
        await body(request)
        session = self._find_session(request)
        if session is not None:
            trusted = session.extras["face"] == "turns" or tools.CLIENT in request.headers
            await self._episodes.leave_session(session, trusted=trusted)
            if session.sitting.close_error is not None:
                raise session.sitting.close_error
        return answer({})

    def _find_session(self, request: Request) -> Session | None:
        return self._episodes.sessions.find_by_token(request.scope["state"]["token"])


async def _stepped(session: Session, response: Item, name: str | None) -> Item:
    turn: Turn | None = session.extras.get("turn")
    if turn is None or not turn.is_open:
        again = turn is not None and name is not None and turn.request == name
        if turn is None or not again:
            turn = await _begun(session, response, name)
    if turn.failure is not None:
        # Another each time: one that is raised again gathers the traces of all the requests.
        failure = turn.failure
        raise recast(failure, Unscorable) if isinstance(failure, Unscorable) else recast(failure, Failed)
    if turn.answer is None:
        turn.answer = await _answered(session, turn.effects)
    return turn.answer


async def _begun(session: Session, response: Item, name: str | None) -> Turn:
    """Take a turn that has not been sent before; one that failed half way is not taken a second time."""
    if session.sitting.is_over:
        raise Refused(409, "the episode is over: POST /reset for another")
    turn = Turn(name)
    session.calls += tool_calls(response["output"])
    try:
        turn.effects = await session.sitting.apply_response(response)
    except EpisodeError as error:
        turn.failure = error
    session.extras["turn"] = turn
    return turn


async def _answered(session: Session, taken: Taken) -> Item:
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
        "observation": _observed([item for item in taken.items if item.get("type") == "message"]),
        "reward": reward,
        "terminated": taken.ended == "done",
        "truncated": taken.ended not in {None, "done"},
        "info": info,
    }


def _observed(messages: Sequence[Item]) -> str | None:
    """Give what *messages* say as one text, which is all that this wire has a place for."""
    return "\n\n".join(filter(None, (text_of(message.get("content")) for message in messages))) or None
