"""Clients of NeMo Gym's Gymnasium-style servers, which answer and reward each turn of the policy as a whole."""

from __future__ import annotations

import time
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, TypeVar, get_args
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, FiniteFloat, ValidationError

from gymsdk import errors
from gymsdk.client import build_bad_answer_error, build_failure, parse_object
from gymsdk.episode import TurnResult
from gymsdk.episode_record import EpisodeRecord
from gymsdk.http.client import HttpResponse
from gymsdk.jsonl import dump_portable_json
from gymsdk.line import StoredVerdict
from gymsdk.request_options import RequestOptions, parse_record_field
from gymsdk.responses import build_function_call_output
from gymsdk.servers.remote import RemoteEnvironment, RemoteState, read_tools
from gymsdk.servers.requests import REQUEST_ID_FIELD
from gymsdk.types import Content, EndReason, Episode, Item, Message, Row, Task, ToolRun, Transcript, Verdict


class ToolOutput(BaseModel):
    """The output of one tool call of a turn."""

    call_id: str
    output: Content


class TurnInfo(BaseModel):
    """The information of a server about a turn; further fields belong to the verdict.

    Attributes:
        tool_outputs: The outputs of the turn's calls.
        ended: Why the episode is over, from gymsdk's servers.
    """

    model_config = ConfigDict(extra="allow")

    tool_outputs: list[ToolOutput] | None = None
    ended: Any = None


class Opening(BaseModel):
    """The answer of `/reset`.

    Attributes:
        observation: The text that the policy reads next, as a message of the user.
        info: The capabilities of the server, and the tools of an episode at gymsdk's servers.
    """

    observation: str | None = None
    info: dict[str, Any] = {}


class TurnAnswer(BaseModel):
    """The answer of `/step`.

    Attributes:
        observation: The text that the policy reads next, as a message of the user.
        reward: The reward of the turn.
        terminated: Whether the turn ended the episode.
        truncated: Whether the server cut the episode off.
        info: More about the turn.
    """

    observation: str | None = None
    reward: FiniteFloat = 0.0
    terminated: bool = False
    truncated: bool = False
    info: TurnInfo = TurnInfo()


T = TypeVar("T", bound=BaseModel)


class TurnState(RemoteState):
    """The local state of an episode that is played by turns.

    Attributes:
        capabilities: The `info` of `/reset`.
        last: The answer to the last turn.
    """

    capabilities: Mapping[str, Any]
    last: TurnAnswer = TurnAnswer(truncated=True)


class TurnEnvironment(RemoteEnvironment):
    """An environment at a Gymnasium-style server, played as `gymnasium_agent` of NeMo Gym plays it.

    The reward of an episode is the sum of the rewards of its turns: such a server has no `/verify`.
    The record has the reward of each turn, that of the last turn with the verdict. Its calls, which servers of gymsdk
    send, count the steps of a turn one by one.
    """

    async def reset(
        self, row: Row | Task, *, seed: int = 0, id: str = "", repeat: int = 0, deadline: float | None = None
    ) -> Episode:
        """Open a session of `row`; see `RemoteEnvironment.reset`."""
        options = RequestOptions(seed, repeat)
        task, raw, connection, answer = await self._post_opening("/reset", row, options, deadline)
        record = EpisodeRecord()
        opened = _parse(Opening, answer, "reset", record)
        return Episode(
            id=id,
            seed=seed,
            task=task,
            row=raw,
            environment=self,
            state=TurnState(connection=connection, capabilities=opened.info),
            transcript=Transcript(opening=[*deepcopy(task.input), *_build_message(opened.observation)]),
            # Servers other than gymsdk's do not name their tools; the row does.
            tools=read_tools(opened.info.get("tools")) or read_tools(task.responses_create_params.get("tools")),
            repeat=repeat,
            deadline=deadline,
            record=record,
        )

    async def play_turn(self, episode: Episode, response: Item) -> TurnResult:
        """Send a turn of the policy, also one that its token limit cut off, and return what follows it.

        Raises:
            EpisodeError: The server failed or did not answer.
        """
        state = _get_state(episode)
        body = {**episode.row, "response": response}
        if state.capabilities.get("supports_step_idempotency") is True:
            body[REQUEST_ID_FIELD] = uuid4().hex
        started, started_clock = time.time(), time.perf_counter()
        answer = await state.connection.post("/step", body, stage="step", deadline=episode.deadline)
        if not answer.ok:
            raise build_failure(answer, "step")
        state.last = turn = _parse(TurnAnswer, answer, "step", episode.record)
        milliseconds = round((time.perf_counter() - started_clock) * 1e3, 3)
        calls = [item for item in response["output"] if item.get("type") == "function_call"]
        runs = [ToolRun(str(call.get("call_id")), str(call.get("name")), started, milliseconds) for call in calls]
        ended = _get_end_reason(turn)
        # After the end, NeMo Gym's agent adds nothing to the conversation.
        outputs = [build_function_call_output(output.call_id, output.output) for output in turn.info.tool_outputs or ()]
        items = [] if ended else [*outputs, *_build_message(turn.observation)]
        return TurnResult(items, turn.reward, len(calls), ended, runs)

    async def verify(self, episode: Episode) -> Verdict:
        """Return a verdict without a reward of its own, with the fields of the last turn."""
        state = _get_state(episode)
        truncated = state.last.truncated or episode.transcript.ended != "done"
        info = state.last.info.model_dump(exclude_unset=True)
        fields = {"terminated": state.last.terminated, "truncated": truncated, "info": info}
        return StoredVerdict.model_validate({"reward": 0.0, **fields})

    async def close(self, episode: Episode) -> None:
        """Close the session, if the server has an endpoint for it."""
        state = _get_state(episode)
        if state.capabilities.get("supports_explicit_close") is not True:
            return
        answer = await state.connection.post("/close", {}, stage="close")
        if not answer.ok:
            raise build_failure(answer, "close")


def _parse(kind: type[T], answer: HttpResponse, stage: str, record: EpisodeRecord) -> T:
    """Parse an answer, and add the calls in it to the *record* of the episode."""
    body = parse_object(answer, stage)
    sent = parse_record_field(body) or EpisodeRecord()
    # The limit holds for the whole episode, and the server has sent only what came since its last answer.
    record.left_out += sent.left_out
    for call in sent.calls:
        record.add_call(call, len(dump_portable_json(call)))
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        message = f"the answer of {answer.host} is invalid: {errors.format_validation_error(error)}"
        raise build_bad_answer_error(message, stage) from None


def _get_state(episode: Episode) -> TurnState:
    assert isinstance(episode.state, TurnState), "this environment opened the episode"
    return episode.state


def _build_message(observation: str | None) -> list[Item]:
    return [Message(role="user", content=observation).item()] if observation else []


def _get_end_reason(turn: TurnAnswer) -> EndReason | None:
    """Return why the turn ended the episode; gymsdk's servers name the reason."""
    if not (turn.terminated or turn.truncated):
        return None
    named = turn.info.ended
    return named if named in get_args(EndReason) else "done" if turn.terminated else "turns"
