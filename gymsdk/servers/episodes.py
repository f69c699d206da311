"""Opens, plays and judges the episodes behind the sessions of one environment.

A response is judged in the session in which it was played. `find_session` finds that session by the row and by the
tool calls that the session has received.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from gymsdk import responses, tracing
from gymsdk.concurrency import INTERRUPTS
from gymsdk.edge.errors import RequestRejected
from gymsdk.environment import Environment
from gymsdk.episode import (
    EpisodeRunner,
    JudgedEpisode,
    TurnResult,
    drop_unfinished_turn,
    verify_episode,
    verify_transcript,
)
from gymsdk.errors import BadRow
from gymsdk.jsonl import dump_json, parse_json
from gymsdk.memory import EpisodeCounter
from gymsdk.models import recordings
from gymsdk.plugins.results import copy_state
from gymsdk.responses import NOT_RUN_OUTPUT, TOKEN_FIELDS
from gymsdk.servers.requests import RowRequest, SeedRequest, limit_budget, parse_task, remove_nulls, to_canonical
from gymsdk.servers.session_clients import SessionClient
from gymsdk.servers.sessions import Session, SessionKind, SessionOrigin, SessionStore
from gymsdk.tools import InvalidArguments
from gymsdk.types import Budget, EndReason, Episode, Item, ToolCall, Transcript

JUDGED_WITHOUT_MESSAGE = "The response was judged without the session."
MISMATCH_ADVICE = (
    "The verdict of this environment depends on the session, so nothing was judged. Open a session for this row and"
    " play the row there, or send the row without the cookie to have it judged without a session."
)


MAX_BUDGET = Budget(turns=10_000, tools=10_000)
"""Largest budget of an episode without a client's budget, and of each episode that is judged."""

SESSION_LOST: dict[str, Any] = {"stage": "step", "kind": "session_lost", "retryable": True}
"""Fields of a rejection that tell an agent to play the rollout again: it is lost, not bad."""

MAX_EARLIER_SESSIONS = 64
"""How many earlier sessions of a client are remembered with its newest one: the first, and the latest."""

SESSION_JUDGED: dict[str, Any] = {"stage": "step", "kind": "session_judged", "retryable": False}

SESSION_MISMATCH: dict[str, Any] = {"stage": "verify", "kind": "session_mismatch", "retryable": False}
"""Fields of a rejection when the response was not played in the cookie's session."""

OPENING_PATHS = {"tools": "/seed_session", "typed": "/seed_session", "turns": "/reset"}

RESERVED_PATHS = frozenset(
    {"seed_session", "close_session", "verify", "aggregate_metrics", "reverify_mode", "reset", "step", "close", "mcp"}
)
"""Paths of a resources server that are endpoints, so no tool of that name can be called over HTTP."""

OTHER_ROW_MESSAGE = "The cookie's session was not opened with this row: {difference}."
NO_CALL_RECEIVED_MESSAGE = "None of the response's tool calls was sent to the cookie's session."
CALLS_NOT_RECEIVED_MESSAGE = (
    "Some of the response's tool calls were not sent to the cookie's session; the first is a call of {name!r}."
)
ABANDONED_MESSAGE = (
    "The cookie's session was opened after the session that played this response. The earlier session was judged."
)


class EpisodeService:
    """The episodes of one environment, each open in a session.

    Args:
        environment: The environment.
        sessions: The open sessions.
        budget: The largest budget of an episode.
    """

    def __init__(self, environment: Environment, sessions: SessionStore[Session], budget: Budget | None = None) -> None:
        self.environment = environment
        self.sessions = sessions
        self._budget = budget or MAX_BUDGET
        self._counter = EpisodeCounter()

    async def open_session(
        self,
        request: RowRequest,
        kind: SessionKind,
        *,
        name: str | None = None,
        client: SessionClient | None = None,
        opening: SeedRequest | None = None,
        previous: Session | None = None,
        has_prompt: bool = True,
    ) -> Session:
        """Open a session with a new episode of a row.

        Args:
            request: The row and its options.
            kind: How the session will be played.
            name: The client's own id of the session.
            client: The client, if it chose the id.
            opening: The request, in the same case.
            previous: The client's previous session; it stays open for a verdict.
            has_prompt: Whether the row includes the prompt.

        Raises:
            RequestRejected: The store is full, or the name was used before.
            BadRow: The row does not fit the environment.
        """
        await self.sessions.check_capacity(name, client)
        request.identity.compute()
        runner = EpisodeRunner(self.environment, self._limit_budget(request, kind))
        open_row = partial(runner.open, seed=request.seed, id=request.id, repeat=request.repeat)
        try:
            episode = await open_row(request.row)
        except BadRow as error:
            episode = await open_row(remove_nulls(request.row, error))
        origin = SessionOrigin(
            request.identity,
            episode.task,
            request.seed,
            typed=kind == "typed",
            prompted=has_prompt,
            seed_given=request.seed_given,
        )
        session = Session(
            token=self.sessions.create_token(),
            name=name,
            client=client,
            opening=opening,
            opened=runner,
            rollout_id=episode.id,
            tools=episode.tools,
            kind=kind,
            origin=origin,
            counter=self._counter,
            earlier=self._list_unjudged(previous),
        )
        self._counter.begin()
        try:
            return await self.sessions.add(session)
        except BaseException:
            await session.close()
            raise

    def _list_unjudged(self, previous: Session | None) -> tuple[Session, ...]:
        """Return the sessions before a new one that wait for their verdict: the first, and the latest."""
        if previous is None or previous.is_judged:
            return ()
        earlier = (*self._earlier_sessions(previous), previous)
        return earlier if len(earlier) <= MAX_EARLIER_SESSIONS else (earlier[0], *earlier[1 - MAX_EARLIER_SESSIONS :])

    @asynccontextmanager
    async def lock_session(self, session: Session | None, *kinds: SessionKind) -> AsyncIterator[Session]:
        """Lock an open session that is played in one of the given ways.

        Raises:
            RequestRejected: The session does not exist, is closed or is played in another way.
        """
        if session is None:
            sentence = (
                f"the request has no session: POST a row to {OPENING_PATHS[kinds[0]]} first, then send its cookie"
            )
            raise RequestRejected(409, sentence, **SESSION_LOST)
        # A tool call carries no rollout id; the log takes it from the session.
        tracing.set_rollout_id(session.rollout_id)
        if session.kind not in kinds:
            raise RequestRejected(
                409,
                f"this session was opened by {OPENING_PATHS[session.kind]}: use its endpoints",
            )
        async with session.lock:
            if self.sessions.find_by_token(session.token) is None:
                raise RequestRejected(409, "the session was closed meanwhile; open another", **SESSION_LOST)
            if session.opened is not None:
                session.opened.restart_deadline()
            with self.sessions.use(session):
                yield session

    @asynccontextmanager
    async def lock_playing_session(self, session: Session | None, *kinds: SessionKind) -> AsyncIterator[Session]:
        """Lock a session as `lock_session` does, to continue its episode.

        Raises:
            RequestRejected: As in `lock_session`, or the session was left or judged.
        """
        async with self.lock_session(session, *kinds) as locked:
            if locked.left:
                raise RequestRejected(409, "the session was closed; open another", **SESSION_LOST)
            if locked.judged:
                raise RequestRejected(409, "the session was judged and is over; open another", **SESSION_JUDGED)
            yield locked

    async def leave_session(self, session: Session, *, trusted: bool) -> None:
        """Close a session; unless `trusted`, a policy may have asked, so an unjudged session waits for its verdict."""
        if trusted or session.is_judged:
            await self.sessions.close(session)
        else:
            self.sessions.close_soon(session)

    async def call_tool(self, session: Session, name: str, arguments: str) -> tuple[Item, TurnResult]:
        """Call a tool in the episode of a locked session.

        Returns:
            The output item, and the effects of the call.

        Raises:
            RequestRejected: The episode has no time left.
        """
        call = responses.build_function_call(name, arguments)
        if session.runner.is_over:
            return responses.build_function_call_output(call["call_id"], NOT_RUN_OUTPUT), TurnResult(ended="done")
        result = await session.runner.apply_response({"output": [call]})
        if not result.items:
            raise RequestRejected(503, f"the tool {name!r} had no time left", retry_after=1)
        return result.items[0], result

    async def judge(
        self, request: RowRequest, items: Sequence[Item], end_reason: EndReason, session: Session | None
    ) -> tuple[JudgedEpisode, Session | None, str | None]:
        """Judge a response as the episode of a row.

        A session of the same row provides its state. Judging does not change that state, but the session is over.
        Without a session the state is rebuilt if the verdict uses it.

        Args:
            request: The row and its options.
            items: The output of the response.
            end_reason: How the episode ended.
            session: The cookie's session, if there is one.

        Returns:
            The verdict, the session that was judged, and why the cookie's session was not judged.

        Raises:
            RequestRejected: The session was judged with another response, or the response was not played in it and the
                verdict depends on the state: a rebuilt state could differ.
        """
        if session is None:
            return await self._judge_without_session(request, items, end_reason), None, None
        async with self.lock_session(session, "tools", "typed", "turns"):
            played, reason = self._find_played_session(session, request, items)
            if played is session:
                return await self._judge_session(session, request, items, end_reason), session, reason
        if played is None:
            return await self._judge_without_session(request, items, end_reason), None, reason
        async with self.lock_session(played, "tools", "typed", "turns"):
            return await self._judge_session(played, request, items, end_reason), played, reason

    def _find_played_session(
        self, session: Session, request: RowRequest, items: Sequence[Item]
    ) -> tuple[Session | None, str | None]:
        """Return the session in which a response was played: the given one, or an earlier one of the same client.

        Raises:
            BadRow: The row does not fit the environment.
            RequestRejected: No session matches, and the verdict depends on the state.
        """
        match = find_session([*self._earlier_sessions(session), session], request, items, self.environment)
        if match.session is not None:
            return match.session, match.reason
        # A judged session of another row is over; the client has only kept its cookie.
        is_stale = not match.row_has_session and session.is_judged
        if self.environment.needs_replay and not is_stale:
            parse_task(request.row, self.environment)
            raise RequestRejected(409, f"{match.reason} {MISMATCH_ADVICE}", **SESSION_MISMATCH)
        return None, f"{match.reason} {JUDGED_WITHOUT_MESSAGE}"

    def _earlier_sessions(self, session: Session) -> list[Session]:
        return [each for each in session.earlier if self.sessions.is_open(each) and not each.is_judged]

    async def _judge_session(
        self, session: Session, request: RowRequest, items: Sequence[Item], end_reason: EndReason
    ) -> JudgedEpisode:
        _fix_judged_response(session, items, end_reason)
        if session.verdict is not None:
            return session.verdict
        copy = _copy_episode(session.episode, self.environment, request, has_prompt=session.origin.prompted)
        if session.kind != "turns":
            # Replies never reach a tool endpoint, so a `step` hook that answers replies runs now.
            await self.environment.replay_into(copy, drop_unfinished_turn(items, end_reason), calls=False)
        judged = await verify_episode(self.environment, copy, items, end_reason)
        if session.origin.prompted:
            # The verdict on the same response cannot change any more, and clients of NeMo Gym send no close.
            session.verdict = judged
            self.sessions.release(session)
        return judged

    async def _judge_without_session(
        self, request: RowRequest, items: Sequence[Item], end_reason: EndReason
    ) -> JudgedEpisode:
        judge_row = partial(
            verify_transcript,
            self.environment,
            items=items,
            seed=request.seed,
            repeat=request.repeat,
            ended=end_reason,
            seconds=limit_budget(request.budget, self._budget).seconds,
        )
        try:
            return await judge_row(request.row)
        except BadRow as error:
            return await judge_row(remove_nulls(request.row, error))

    def _limit_budget(self, request: RowRequest, kind: SessionKind) -> Budget:
        budget = limit_budget(request.budget, self._budget)
        # Each tool call arrives alone; only the client knows how they group into turns.
        return budget if kind == "turns" else budget.model_copy(update={"turns": MAX_BUDGET.turns})


def _fix_judged_response(session: Session, items: Sequence[Item], end_reason: EndReason) -> None:
    """Allow only one response to be judged in a session; judging the same response again is allowed."""
    # The texts and calls tell responses apart; the token ids would take as long as a parse of the body.
    content = [{key: value for key, value in item.items() if key not in TOKEN_FIELDS} for item in items]
    digest = hashlib.sha256(dump_json([end_reason, *content])).digest()
    session.judged = session.judged or digest
    if session.judged != digest:
        raise RequestRejected(
            409, "the session was judged with another response: open another session for this one", **SESSION_JUDGED
        )


def _copy_episode(episode: Episode, environment: Environment, request: RowRequest, *, has_prompt: bool) -> Episode:
    """Copy an episode for judging; if it was opened without the prompt, the row of the request provides the prompt."""
    opening = list(episode.transcript.opening)
    task = episode.task if has_prompt else parse_task(request.row, environment)
    return replace(
        episode,
        task=task,
        state=copy_state(episode.state) if environment.needs_replay else episode.state,
        transcript=Transcript(opening=opening if has_prompt else [*task.input, *opening]),
        record=episode.record.copy(),
        deadline=asyncio.get_running_loop().time() + MAX_BUDGET.seconds,
    )


@dataclass(frozen=True, slots=True)
class Match:
    """The session in which a response was played, and why it is not the newest.

    Attributes:
        session: The session, or `None` if no session matches.
        reason: Why the newest session does not match.
        row_has_session: Whether a session of the row exists.
    """

    session: Session | None
    reason: str | None = None
    row_has_session: bool = True


def find_session(
    candidates: Sequence[Session], request: RowRequest, items: Sequence[Item], environment: Environment
) -> Match:
    """Find the session in which the policy played a response.

    Args:
        candidates: The sessions of one cookie in the order in which they were opened; the last is the newest.
        request: The row.
        items: The output of the response.
        environment: The environment of the sessions.

    Raises:
        BadRow: The row is invalid for the environment.
    """
    newest = candidates[-1]
    row_sessions, difference = _find_sessions_of_row(candidates, request, environment)
    if not row_sessions:
        return Match(None, OTHER_ROW_MESSAGE.format(difference=difference), row_has_session=False)
    calls = ResponseCalls.from_items(items, row_sessions[-1], environment)
    if newest in row_sessions and calls.is_complete_in(newest):
        return Match(newest)
    with_calls = [session for session in row_sessions if calls.has_received_any([session])]
    # A call of an unknown tool may have opened a newer session, which received the later calls.
    searched = candidates[candidates.index(with_calls[0]) :] if with_calls and calls.others else row_sessions
    not_received = calls.find_not_received(searched)
    if not_received or not with_calls:
        name = not_received[0].name if not_received else ""
        return Match(None, CALLS_NOT_RECEIVED_MESSAGE.format(name=name) if with_calls else NO_CALL_RECEIVED_MESSAGE)
    complete = [session for session in with_calls if not calls.find_not_received([session])]
    # The policy may have opened the newer session with a tool call, to be judged in another session.
    chosen = complete[-1] if complete and not calls.others else with_calls[0]
    return Match(chosen, None if chosen is newest else ABANDONED_MESSAGE)


@dataclass(frozen=True, slots=True)
class ResponseCalls:
    """The tool calls of a response that have an answer.

    Agents send a call to the server if the episode offers the tool and the arguments are a JSON object that the tool
    accepts. They answer other calls themselves, or post each to the path of its name, which may be an endpoint that
    opens a session.

    Attributes:
        offered: The calls of offered tools with valid arguments.
        others: The calls of other tools.
        environment: The environment of the episode.
    """

    offered: list[ToolCall]
    others: list[ToolCall]
    environment: Environment

    @classmethod
    def from_items(cls, items: Sequence[Item], session: Session, environment: Environment) -> ResponseCalls:
        """Return the calls among `items`, which were played in an episode like that of `session`."""
        names = {tool.get("name") for tool in session.tools} - RESERVED_PATHS
        answered = [
            action
            for span in responses.iter_turn_spans(items)
            for action in responses.get_played_actions(items, span)
            if isinstance(action, ToolCall)
        ]
        offered = [call for call in answered if call.name in names and call.parsed() is not None]
        return cls(offered, [call for call in answered if call.name not in names], environment)

    def is_complete_in(self, session: Session) -> bool:
        """Return whether `session` received every call, including calls of unknown tools."""
        missing, _ = _pair_calls(self.others, session.calls, lambda call: call.name)
        return not missing and not self.find_not_received([session])

    def has_received_any(self, sessions: Iterable[Session]) -> bool:
        """Return whether one of `sessions` received an offered call, or agents would send none of the offered calls."""
        missing = self._find_missing(sessions)
        return len(missing) < len(self.offered) or not self._keep_sendable(missing)

    def find_not_received(self, sessions: Iterable[Session]) -> list[ToolCall]:
        """Return the offered calls that `sessions` did not receive, except those that agents do not send."""
        return self._keep_sendable(self._find_missing(sessions))

    def _find_missing(self, sessions: Iterable[Session]) -> list[ToolCall]:
        recorded = [call for session in sessions for call in session.calls]
        missing, rest = _pair_calls(self.offered, recorded, _written_key)
        if missing and rest:
            missing, _ = _pair_calls(missing, rest, partial(_received_key, environment=self.environment))
        return missing

    def _keep_sendable(self, calls: Sequence[ToolCall]) -> list[ToolCall]:
        """Return the *calls* that agents send: agents answer calls that the tool rejects."""
        return [call for call in calls if _received_key(call, self.environment) is not None]


def _pair_calls(
    calls: Sequence[ToolCall], recorded: Sequence[ToolCall], key_of: Callable[[ToolCall], Hashable]
) -> tuple[list[ToolCall], list[ToolCall]]:
    """Match each call with one recorded call that has the same `key_of`.

    Returns:
        The calls without a match, and the recorded calls without a match.
    """
    available: defaultdict[Hashable, list[ToolCall]] = defaultdict(list)
    for call in recorded:
        available[key_of(call)].append(call)
    missing = []
    for call in calls:
        if matches := available[key_of(call)]:
            matches.pop()
        else:
            missing.append(call)
    return missing, [call for matches in available.values() for call in matches]


def _written_key(call: ToolCall) -> Hashable:
    """Return the name and the arguments as the policy wrote them, without nulls, spacing and key order."""
    text = call.arguments.encode("utf-8", "replace")
    try:
        return call.name, _freeze(to_canonical(parse_json(text or b"{}")))
    except (ValueError, RecursionError):
        return call.name, text


def _received_key(call: ToolCall, environment: Environment) -> Hashable | None:
    """Return the name and the arguments as the tool receives them, or `None` if the tool rejects them."""
    tool = environment.tools.get(call.name)
    if tool is None:
        return _written_key(call)
    try:
        return call.name, tool.received(call.arguments)
    except InvalidArguments:
        return None
    except INTERRUPTS:
        raise
    except BaseException:  # noqa: BLE001  # a validator of the environment may raise anything
        # Agents send a call that the validator cannot check, and the server answers with a failure.
        return _written_key(call)


def _freeze(value: Any) -> Hashable:
    """Return a JSON value as a hashable one; 1 and 1.0 are equal, 1 and true are not."""
    if isinstance(value, dict):
        return frozenset((key, _freeze(member)) for key, member in value.items())
    if isinstance(value, list):
        return tuple(map(_freeze, value))
    return (bool, value) if isinstance(value, bool) else value


def _find_sessions_of_row(
    candidates: Sequence[Session], request: RowRequest, environment: Environment
) -> tuple[list[Session], str | None]:
    """Return the candidates that were opened with the row, and how the row of the last candidate differs, if it does.

    A session whose row differs only in fields that clients add or leave out counts if no other session matches.
    """
    difference: str | None = None
    for exact in (True, False):
        differences = [_describe_difference(session, request, environment, exact=exact) for session in candidates]
        same_row = [session for session, each in zip(candidates, differences, strict=True) if each is None]
        difference = differences[-1]
        if same_row:
            return same_row, difference
    return [], difference


def _describe_difference(session: Session, request: RowRequest, environment: Environment, *, exact: bool) -> str | None:
    """Describe how a session's row differs from the row of the request, or return `None` if they are the same.

    Unless `exact`, the agent may have put a system prompt before the row's prompt, and one side may lack the task
    index, which some clients send only with one of their requests.
    """
    origin = session.origin
    opened, requested = origin.identity, request.identity
    if session.client is not None and request.id and not session.client.episode.includes(request.id):
        return "the rollout id differs"
    for name, value in opened.fields.items():
        if name not in requested.fields or requested.fields[name] != value:
            return f"the field {name!r} differs"
    if origin.prompted and not _is_same_prompt(opened.prompt, requested.prompt, exact=exact):
        return "the prompt differs"
    if not _has_seed(origin, request, exact=exact):
        return "the seed or the task index differs"
    return _find_added_field(session, request, environment)


def _is_same_prompt(opened: list[Any] | None, requested: list[Any] | None, *, exact: bool) -> bool:
    if opened is None or requested is None or opened == requested:
        return True
    return not exact and recordings.has_added_system_prompt(requested, opened)


def _has_seed(origin: SessionOrigin, request: RowRequest, *, exact: bool) -> bool:
    """Return whether the row of the request has the seed with which the session was opened."""
    if request.seed == origin.seed:
        return True
    if request.seed_given or origin.seed_given:
        return False
    indexes = origin.identity.task_index, request.identity.task_index
    if None not in indexes:
        return False
    # Without an index, the fields of the row determine the seed, and an agent may add fields.
    lacks_both = indexes == (None, None)
    # The typed body has no field for the index.
    may_lack_index = origin.typed and indexes[0] is None
    return lacks_both or may_lack_index or (not exact and request.identity.prompt is not None)


def _find_added_field(session: Session, request: RowRequest, environment: Environment) -> str | None:
    """Describe the first difference in a declared field that the request has and the session's row lacks, if any."""
    origin = session.origin
    added = request.identity.fields.keys() - origin.identity.fields.keys()
    declared = sorted(added & environment.task_type.model_fields.keys())
    if not declared:
        return None
    session_task, task = session.origin.task, parse_task(request.row, environment)
    for name in declared:
        if getattr(session_task, name, None) != getattr(task, name, None):
            return f"the field {name!r} differs"
    return None
