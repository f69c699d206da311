"""Opens, plays and judges the episodes behind sessions, and finds the session in which a response was played."""

from __future__ import annotations

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias

from gymsdk import context, responses
from gymsdk.environment import Environment
from gymsdk.episode import (
    Budget,
    EpisodeRunner,
    JudgedEpisode,
    TurnResult,
    drop_unfinished_turn,
    verify_episode,
    verify_transcript,
)
from gymsdk.errors import INTERRUPTS
from gymsdk.jsonl import dump_json, parse_json
from gymsdk.models import recordings
from gymsdk.plugins import calls
from gymsdk.responses import NOT_RUN_OUTPUT
from gymsdk.servers.app import RequestRejected
from gymsdk.servers.requests import RowIdentity, RowRequest, limit_budget, parse_task, play_without_nulls, to_canonical
from gymsdk.servers.routing import RESERVED_PATHS
from gymsdk.servers.sessions import Session, SessionStore
from gymsdk.tools import InvalidArguments
from gymsdk.types import EndReason, Episode, Item, Row, ToolCall, Transcript

OTHER_ROW_MESSAGE = "The cookie's session was not opened with this row: {difference}."
NO_CALL_SEEN_MESSAGE = "None of the response's tool calls was sent to the cookie's session."
CALLS_UNSEEN_MESSAGE = (
    "Some of the response's tool calls were not sent to the cookie's session; the first is a call of {name!r}."
)
ABANDONED_MESSAGE = (
    "The cookie's session was opened after the session that played this response. The earlier session was judged."
)

JUDGED_WITHOUT_MESSAGE = "The response was judged without the session."
MISMATCH_ADVICE = (
    "The verdict of this environment depends on the session, so nothing was judged. Open a session for this row and"
    " play the row there, or send the row without the cookie to have it judged without a session."
)


MAX_BUDGET = Budget(turns=10_000, tools=10_000)
"""Largest budget of an episode without a client's budget, and of each episode that is judged."""

SessionKind: TypeAlias = Literal["tools", "typed", "turns"]
"""How a session is played: by tool calls (opened with a flat or a typed body), or turn by turn."""

SESSION_LOST: dict[str, Any] = {"stage": "step", "kind": "session_lost", "retryable": True}
"""Fields of a rejection that tell an agent to play the rollout again: it is lost, not bad."""

MAX_EARLIER_SESSIONS = 64
"""How many earlier sessions of a client are remembered with its newest one: the first, and the latest."""

SESSION_JUDGED: dict[str, Any] = {"stage": "step", "kind": "session_judged", "retryable": False}

SESSION_MISMATCH: dict[str, Any] = {"stage": "verify", "kind": "session_mismatch", "retryable": False}
"""Fields of a rejection when the response was not played in the cookie's session."""

OPENING_PATHS = {"tools": "/seed_session", "typed": "/seed_session", "turns": "/reset"}


@dataclass(frozen=True, slots=True)
class SessionOrigin:
    """The row with which a session was opened.

    Attributes:
        identity: The row in canonical form.
        seed: The episode's seed.
        typed: Whether the client opened the session with the typed body.
        prompted: Whether the row had a prompt; the typed body may leave the prompt to the agent.
        seed_given: Whether the client chose the seed; otherwise the row determined it.
    """

    identity: RowIdentity
    seed: int
    typed: bool = False
    prompted: bool = True
    seed_given: bool = False


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
    """Find the session in which `items`, the response to a row, were played.

    Args:
        candidates: The sessions of one cookie in the order in which they were opened; the last is the current one.
        request: The row.
        items: The output of the response.
        environment: The environment of the sessions.

    Raises:
        BadRow: The row does not fit the environment.
    """
    newest = candidates[-1]
    fitting, differs = _sessions_of_row(candidates, request, environment)
    if not fitting:
        return Match(None, OTHER_ROW_MESSAGE.format(difference=differs), row_has_session=False)
    calls = ResponseCalls.from_items(items, fitting[-1], environment)
    if newest in fitting and calls.is_complete_in(newest):
        return Match(newest)
    sharing = [session for session in fitting if calls.has_seen_any([session])]
    # A call of an unknown tool may have opened a newer session, which received the later calls.
    played = candidates[candidates.index(sharing[0]) :] if sharing and calls.others else fitting
    unseen = calls.find_unseen(played)
    if unseen or not sharing:
        name = unseen[0].name if unseen else ""
        return Match(None, CALLS_UNSEEN_MESSAGE.format(name=name) if sharing else NO_CALL_SEEN_MESSAGE)
    complete = [session for session in sharing if not calls.find_unseen([session])]
    # A policy may have opened the newer session itself; it must not choose where it is judged.
    chosen = complete[-1] if complete and not calls.others else sharing[0]
    return Match(chosen, None if chosen is newest else ABANDONED_MESSAGE)


def is_judged(session: Session) -> bool:
    """Return whether the session was judged."""
    return "judged" in session.extras or session.runner.result is not None


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
        episode = _episode_of(session)
        names = {tool.get("name") for tool in episode.tools} - RESERVED_PATHS
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
        return not missing and not self.find_unseen([session])

    def has_seen_any(self, sessions: Iterable[Session]) -> bool:
        """Return whether one of `sessions` received an offered call, or no agent would have sent any of them."""
        missing = self._find_missing(sessions)
        return len(missing) < len(self.offered) or not self._keep_sendable(missing)

    def find_unseen(self, sessions: Iterable[Session]) -> list[ToolCall]:
        """Return the offered calls that `sessions` did not receive, except those that agents do not send."""
        return self._keep_sendable(self._find_missing(sessions))

    def _find_missing(self, sessions: Iterable[Session]) -> list[ToolCall]:
        recorded = [call for session in sessions for call in session.calls]
        missing, rest = _pair_calls(self.offered, recorded, _written_key)
        if missing and rest:
            missing, _ = _pair_calls(missing, rest, partial(_received_key, environment=self.environment))
        return missing

    def _keep_sendable(self, calls: Sequence[ToolCall]) -> list[ToolCall]:
        return [call for call in calls if _received_key(call, self.environment) is not None]


def _pair_calls(
    calls: Sequence[ToolCall], recorded: Sequence[ToolCall], key_of: Callable[[ToolCall], Hashable]
) -> tuple[list[ToolCall], list[ToolCall]]:
    """Match calls with recorded calls.

    Returns:
        The calls without an equal recorded call, and the recorded calls without an equal call, compared by `key_of`.
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
    """Return the name and the arguments without nulls, independent of spacing and key order."""
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
        # Agents send such a call, and the server answers with a failure.
        return _written_key(call)


def _freeze(value: Any) -> Hashable:
    """Return a JSON value as a hashable one; 1 and 1.0 are equal, 1 and true are not."""
    if isinstance(value, dict):
        return frozenset((key, _freeze(member)) for key, member in value.items())
    if isinstance(value, list):
        return tuple(map(_freeze, value))
    return (bool, value) if isinstance(value, bool) else value


def _sessions_of_row(
    candidates: Sequence[Session], request: RowRequest, environment: Environment
) -> tuple[list[Session], str | None]:
    """Return the candidates that were opened with the row, and how the last candidate's row differs.

    A session whose row differs only in fields that clients add or leave out counts if no other session matches.
    """
    difference: str | None = None
    for exact in (True, False):
        differences = [_describe_difference(session, request, environment, exact=exact) for session in candidates]
        fitting = [session for session, found in zip(candidates, differences, strict=True) if found is None]
        if fitting:
            return fitting, differences[-1]
        difference = differences[-1]
    return [], difference


def _describe_difference(session: Session, request: RowRequest, environment: Environment, *, exact: bool) -> str | None:
    """Describe how a session's row differs from the row of the request, or return `None` if they are the same.

    Unless `exact`, the agent may have put a system prompt before the row's prompt, and one side may lack the task
    index, which some clients send only with one of their requests.
    """
    origin: SessionOrigin = session.extras["origin"]
    ours, theirs = origin.identity, request.identity
    for name, value in ours.fields.items():
        if name not in theirs.fields or theirs.fields[name] != value:
            return f"the field {name!r} differs"
    if origin.prompted and not _has_prompt(ours.prompt, theirs.prompt, exact=exact):
        return "the prompt differs"
    if not _has_seed(origin, request, exact=exact):
        return "the seed or the task index differs"
    return _find_added_field(session, request, environment)


def _has_prompt(ours: list[Any] | None, theirs: list[Any] | None, *, exact: bool) -> bool:
    if ours is None or theirs is None or ours == theirs:
        return True
    return not exact and recordings.has_added_system_prompt(theirs, ours)


def _has_seed(origin: SessionOrigin, request: RowRequest, *, exact: bool) -> bool:
    """Return whether the row of the request has the seed with which the session was opened."""
    if request.seed == origin.seed:
        return True
    if request.seed_given or origin.seed_given:
        return False
    indexes = origin.identity.task_index, request.identity.task_index
    if None not in indexes:
        return False
    # Without an index the fields determine the seed, and an agent may add fields.
    is_same = indexes == (None, None)
    # The typed body has no field for the index.
    may_lack_index = origin.typed and indexes[0] is None
    return is_same or may_lack_index or (not exact and request.identity.prompt is not None)


def _find_added_field(session: Session, request: RowRequest, environment: Environment) -> str | None:
    """Describe a difference in declared fields that the request has and the session's row lacks."""
    origin: SessionOrigin = session.extras["origin"]
    added = request.identity.fields.keys() - origin.identity.fields.keys()
    declared = sorted(added & environment.task_type.model_fields.keys())
    if not declared:
        return None
    ours, task = _episode_of(session).task, parse_task(request.row, environment)
    for name in declared:
        if getattr(ours, name, None) != getattr(task, name, None):
            return f"the field {name!r} differs"
    return None


def _episode_of(session: Session) -> Episode:
    episode = session.runner.episode
    assert episode is not None, "a session is opened with its episode"
    return episode


class EpisodeService:
    """The episodes of one environment, each open in a session.

    Args:
        environment: The environment.
        sessions: The open sessions.
        budget: The largest budget of an episode.
    """

    def __init__(self, environment: Environment, sessions: SessionStore, budget: Budget | None = None) -> None:
        self.environment = environment
        self.sessions = sessions
        self._budget = budget or MAX_BUDGET

    async def open_session(
        self,
        request: RowRequest,
        kind: SessionKind,
        *,
        name: str | None = None,
        previous: Session | None = None,
        has_prompt: bool = True,
    ) -> Session:
        """Open a session with a new episode of a row.

        Args:
            request: The row and its options.
            kind: How the session will be played.
            name: The client's own id of the session.
            previous: The client's previous session; it stays open for a verdict.
            has_prompt: Whether the row includes the prompt.

        Raises:
            RequestRejected: The store is full, or the name was used before.
            BadRow: The row does not fit the environment.
        """
        await self.sessions.check_capacity(name)
        runner = EpisodeRunner(self.environment, self._limit_budget(request, kind))
        await play_without_nulls(
            request.row, lambda row: runner.open(row, seed=request.seed, id=request.id, repeat=request.repeat)
        )
        try:
            session = await self.sessions.open(runner, name=name)
        except BaseException:
            await runner.close()
            raise
        origin = SessionOrigin(
            request.identity, request.seed, typed=kind == "typed", prompted=has_prompt, seed_given=request.seed_given
        )
        session.extras |= {"kind": kind, "origin": origin}
        if previous is not None and not is_judged(previous):
            earlier = [*self._earlier_sessions(previous), previous]
            session.extras["earlier"] = (
                earlier if len(earlier) <= MAX_EARLIER_SESSIONS else [earlier[0], *earlier[1 - MAX_EARLIER_SESSIONS :]]
            )
        return session

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
        context.set_rollout_id(session.runner.episode.id if session.runner.episode else "")
        if session.extras["kind"] not in kinds:
            raise RequestRejected(
                409,
                f"this session was opened by {OPENING_PATHS[session.extras['kind']]}: use its endpoints",
            )
        async with session.lock:
            if self.sessions.find_by_token(session.token) is None:
                raise RequestRejected(409, "the session was closed meanwhile; open another", **SESSION_LOST)
            session.runner.restart_deadline()
            try:
                yield session
            finally:
                # Count the time of the call as use.
                self.sessions.find_by_token(session.token)

    @asynccontextmanager
    async def lock_playing_session(self, session: Session | None, *kinds: SessionKind) -> AsyncIterator[Session]:
        """Lock a session as `lock_session` does, to continue its episode.

        Raises:
            RequestRejected: As in `lock_session`, or the session was left or judged.
        """
        async with self.lock_session(session, *kinds) as locked:
            if locked.left:
                raise RequestRejected(409, "the session was closed; open another", **SESSION_LOST)
            if "judged" in locked.extras:
                raise RequestRejected(409, "the session was judged and is over; open another", **SESSION_JUDGED)
            yield locked

    async def leave_session(self, session: Session, *, trusted: bool) -> None:
        """Close a session; unless `trusted`, a policy may have asked, so an unjudged session waits for its verdict."""
        if trusted or is_judged(session):
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
        is_stale = not match.row_has_session and is_judged(session)
        if self.environment.needs_replay and not is_stale:
            parse_task(request.row, self.environment)
            raise RequestRejected(409, f"{match.reason} {MISMATCH_ADVICE}", **SESSION_MISMATCH)
        return None, f"{match.reason} {JUDGED_WITHOUT_MESSAGE}"

    def _earlier_sessions(self, session: Session) -> list[Session]:
        earlier: list[Session] = session.extras.get("earlier", [])
        return [candidate for candidate in earlier if self.sessions.is_open(candidate) and not is_judged(candidate)]

    async def _judge_session(
        self, session: Session, request: RowRequest, items: Sequence[Item], end_reason: EndReason
    ) -> JudgedEpisode:
        _fix_judged_response(session, items, end_reason)
        episode = session.runner.episode
        assert episode is not None, "a session is opened with its episode"
        origin: SessionOrigin = session.extras["origin"]
        copy = _copy_episode(episode, self.environment, request, has_prompt=origin.prompted)
        if session.extras["kind"] != "turns":
            # Replies never reach a tool endpoint, so a `step` hook that answers replies runs now.
            await self.environment.replay_into(copy, drop_unfinished_turn(items, end_reason), calls=False)
        return await verify_episode(self.environment, copy, items, end_reason)

    async def _judge_without_session(
        self, request: RowRequest, items: Sequence[Item], end_reason: EndReason
    ) -> JudgedEpisode:
        seconds = limit_budget(request.budget, self._budget).seconds

        async def judge(row: Row) -> JudgedEpisode:
            return await verify_transcript(
                self.environment,
                row,
                items,
                seed=request.seed,
                repeat=request.repeat,
                ended=end_reason,
                seconds=seconds,
            )

        return await play_without_nulls(request.row, judge)

    def _limit_budget(self, request: RowRequest, kind: SessionKind) -> Budget:
        budget = limit_budget(request.budget, self._budget)
        # Each tool call arrives alone; only the client knows how they group into turns.
        return budget if kind == "turns" else budget.model_copy(update={"turns": MAX_BUDGET.turns})


def _fix_judged_response(session: Session, items: Sequence[Item], end_reason: EndReason) -> None:
    """Allow only one response to be judged in a session; judging the same response again is allowed."""
    digest = hashlib.sha256(dump_json([end_reason, *items])).digest()
    if session.extras.setdefault("judged", digest) != digest:
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
        state=calls.copy_state(episode.state) if environment.needs_replay else episode.state,
        transcript=Transcript(opening=opening if has_prompt else [*task.input, *opening]),
        deadline=asyncio.get_running_loop().time() + MAX_BUDGET.seconds,
    )
