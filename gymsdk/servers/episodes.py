"""Episodes: what opens, calls and judges the sessions' episodes of one environment."""

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
from gymsdk import episode as judging
from gymsdk.environment import Environment
from gymsdk.episode import Budget, EpisodeRunner, JudgedEpisode, TurnResult
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


@dataclass(frozen=True, slots=True)
class SessionOrigin:
    """What a session was opened with: the *identity* of its row, its *seed*, and whether by the *typed* body.

    *prompted* says whether the row had a prompt: the typed body may leave the prompt to the agent. *seed_given* says
    whether the client named the seed; if not, the row decided it.
    """

    identity: RowIdentity
    seed: int
    typed: bool = False
    prompted: bool = True
    seed_given: bool = False


@dataclass(frozen=True, slots=True)
class Match:
    """The *session* in which a response was played, if one of the cookie's is it, and *why* it is not the newest."""

    session: Session | None
    why: str | None = None
    row_has_session: bool = True


def find_session(
    candidates: Sequence[Session], given: RowRequest, items: Sequence[Item], environment: Environment
) -> Match:
    """Find the session in which *items*, the response to the *given* row, were played.

    Args:
        candidates: The sessions that one cookie led to, in the order in which they were opened. The last is the
            cookie's own.
        given: The row.
        items: The output of the response.
        environment: The environment of the sessions.

    Raises:
        BadRow: The row does not fit the environment.
    """
    newest = candidates[-1]
    fitting, differs = _sessions_of_row(candidates, given, environment)
    if not fitting:
        return Match(None, OTHER_ROW_MESSAGE.format(difference=differs), row_has_session=False)
    calls = ResponseCalls.from_items(items, fitting[-1], environment)
    if newest in fitting and calls.is_complete_in(newest):
        return Match(newest)
    shares = [each for each in fitting if calls.any_seen([each])]
    # A call that is no tool's may have opened any of the newer sessions, which got the calls from then on.
    played = candidates[candidates.index(shares[0]) :] if shares and calls.others else fitting
    unseen = calls.unseen(played)
    if unseen or not shares:
        name = unseen[0].name if unseen else ""
        return Match(None, CALLS_UNSEEN_MESSAGE.format(name=name) if shares else NO_CALL_SEEN_MESSAGE)
    complete = [each for each in shares if not calls.unseen([each])]
    # A policy may have opened the newer session by a call that is no tool's: it must not choose where it is judged.
    found = complete[-1] if complete and not calls.others else shares[0]
    return Match(found, None if found is newest else ABANDONED_MESSAGE)


def is_judged(session: Session) -> bool:
    """Whether *session* has its verdict."""
    return "judged" in session.extras or session.sitting.result is not None


@dataclass(frozen=True, slots=True)
class ResponseCalls:
    """The tool calls of a response that have an answer.

    Agents send a call to the server if it is *offered*: a call of a tool that the episode offers, with a JSON object
    that the tool accepts. They answer the *others* themselves, or post each to the path of its name, which may be an
    endpoint that opens a session.
    """

    offered: list[ToolCall]
    others: list[ToolCall]
    environment: Environment

    @classmethod
    def from_items(cls, items: Sequence[Item], session: Session, environment: Environment) -> ResponseCalls:
        """Return the calls among *items*, which were played in an episode like that of *session*."""
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
        """Whether *session* received every call, also those that are no tool's."""
        missing, _ = _pair_calls(self.others, session.calls, lambda call: call.name)
        return not missing and not self.unseen([session])

    def any_seen(self, sessions: Iterable[Session]) -> bool:
        """Whether *sessions* received one of the offered calls, if there are any that agents send."""
        missing = self._missing(sessions)
        return len(missing) < len(self.offered) or not self._sent(missing)

    def unseen(self, sessions: Iterable[Session]) -> list[ToolCall]:
        """Return the offered calls that *sessions* have not received, without those that agents do not send."""
        return self._sent(self._missing(sessions))

    def _missing(self, sessions: Iterable[Session]) -> list[ToolCall]:
        recorded = [call for session in sessions for call in session.calls]
        missing, rest = _pair_calls(self.offered, recorded, _written_key)
        if missing and rest:
            missing, _ = _pair_calls(missing, rest, partial(_received_key, environment=self.environment))
        return missing

    def _sent(self, calls: Sequence[ToolCall]) -> list[ToolCall]:
        return [call for call in calls if _received_key(call, self.environment) is not None]


def _pair_calls(
    calls: Sequence[ToolCall], recorded: Sequence[ToolCall], form: Callable[[ToolCall], Hashable]
) -> tuple[list[ToolCall], list[ToolCall]]:
    """Return those of *calls* that have no equal in *recorded*, and the rest of *recorded*; calls compare by *form*."""
    available: defaultdict[Hashable, list[ToolCall]] = defaultdict(list)
    for call in recorded:
        available[form(call)].append(call)
    missing = []
    for call in calls:
        if equals := available[form(call)]:
            equals.pop()
        else:
            missing.append(call)
    return missing, [call for equals in available.values() for call in equals]


def _written_key(call: ToolCall) -> Hashable:
    """Return the name and the arguments of *call*, without nulls, however a client spaces and orders them."""
    text = call.arguments.encode("utf-8", "replace")
    try:
        return call.name, _freeze(to_canonical(parse_json(text or b"{}")))
    except (ValueError, RecursionError):
        return call.name, text


def _received_key(call: ToolCall, environment: Environment) -> Hashable | None:
    """Return the name and what the tool receives for the arguments, `None` where the tool refuses them."""
    tool = environment.tools.get(call.name)
    if tool is None:
        return _written_key(call)
    try:
        return call.name, tool.received(call.arguments)
    except InvalidArguments:
        return None
    except INTERRUPTS:
        raise
    except BaseException:  # noqa: BLE001  # code of the author's may raise anything as it reads arguments
        # Agents send such a call, and the server answers with a failure.
        return _written_key(call)


def _freeze(value: Any) -> Hashable:
    """Return *value*, which is JSON, as something that can be hashed; 1 and 1.0 are equal, 1 and true are not."""
    if isinstance(value, dict):
        return frozenset((key, _freeze(each)) for key, each in value.items())
    if isinstance(value, list):
        return tuple(map(_freeze, value))
    return (bool, value) if isinstance(value, bool) else value


def _sessions_of_row(
    candidates: Sequence[Session], given: RowRequest, environment: Environment
) -> tuple[list[Session], str | None]:
    """Return those of *candidates* that were opened with the *given* row, and what differs in the last candidate.

    A session whose row differs only in what clients add or leave out counts if no other session fits.
    """
    differs: str | None = None
    for exact in (True, False):
        differences = [_describe_difference(each, given, environment, exact=exact) for each in candidates]
        fitting = [each for each, found in zip(candidates, differences, strict=True) if found is None]
        if fitting:
            return fitting, differences[-1]
        differs = differences[-1]
    return [], differs


def _describe_difference(session: Session, given: RowRequest, environment: Environment, *, exact: bool) -> str | None:
    """Return what opened *session* and is not in the *given* row, `None` where the session is one of that row.

    Unless *exact*, the agent may have put a system prompt before the row's prompt, and one side may lack the task
    index, which some clients send only with one of their requests.
    """
    opening: SessionOrigin = session.extras["opening"]
    ours, theirs = opening.identity, given.identity
    for name, value in ours.fields.items():
        if name not in theirs.fields or theirs.fields[name] != value:
            return f"the field {name!r} differs"
    if opening.prompted and not _has_prompt(ours.prompt, theirs.prompt, exact=exact):
        return "the prompt differs"
    if not _has_seed(opening, given, exact=exact):
        return "the seed or the task index differs"
    return _find_added_field(session, given, environment)


def _has_prompt(ours: list[Any] | None, theirs: list[Any] | None, *, exact: bool) -> bool:
    if ours is None or theirs is None or ours == theirs:
        return True
    return not exact and recordings.has_added_system_prompt(theirs, ours)


def _has_seed(opening: SessionOrigin, given: RowRequest, *, exact: bool) -> bool:
    """Whether the *given* row has the seed that the session was opened with."""
    if given.seed == opening.seed:
        return True
    if given.seed_given or opening.seed_given:
        return False
    indexes = opening.identity.task_index, given.identity.task_index
    if None not in indexes:
        return False
    # The fields decide the seed where there is no index, and an agent may add fields.
    is_same = indexes == (None, None)
    # The typed body has no place for an index.
    may_lack_index = opening.typed and indexes[0] is None
    return is_same or may_lack_index or (not exact and given.identity.prompt is not None)


def _find_added_field(session: Session, given: RowRequest, environment: Environment) -> str | None:
    """Return what differs in the fields that the row has beside those of the session, where the schema knows them."""
    opening: SessionOrigin = session.extras["opening"]
    added = given.identity.fields.keys() - opening.identity.fields.keys()
    declared = sorted(added & environment.task_type.model_fields.keys())
    if not declared:
        return None
    ours, task = _episode_of(session).task, parse_task(given.row, environment)
    for name in declared:
        if getattr(ours, name, None) != getattr(task, name, None):
            return f"the field {name!r} differs"
    return None


def _episode_of(session: Session) -> Episode:
    episode = session.sitting.episode
    assert episode is not None, "a session is opened with its episode"
    return episode


MAX_BUDGET = Budget(turns=10_000, tools=10_000)
"""What an episode may use whose client has named no budget: it keeps one of its own."""

SessionKind: TypeAlias = Literal["tools", "typed", "turns"]
"""How a session is played: by its tools (opened by the typed body or not), or turn by turn."""

SESSION_LOST: dict[str, Any] = {"stage": "step", "kind": "session_lost", "retryable": True}
"""What tells an agent that a refusal is no tool's answer: its rollout is lost, not bad."""

MAX_EARLIER_SESSIONS = 64
"""How many sessions that a client left for another are remembered with that one: the first, and the latest."""

SESSION_JUDGED: dict[str, Any] = {"stage": "step", "kind": "session_judged", "retryable": False}

SESSION_MISMATCH: dict[str, Any] = {"stage": "verify", "kind": "session_mismatch", "retryable": False}
"""What a refusal says where the cookie names a session that cannot be the one the response was played in."""

OPENING_PATHS = {"tools": "/seed_session", "typed": "/seed_session", "turns": "/reset"}


class EpisodeService:
    """The episodes of *environment*, each open in one of *sessions*."""

    def __init__(self, environment: Environment, sessions: SessionStore, budget: Budget | None = None) -> None:
        self.environment = environment
        self.sessions = sessions
        self._budget = budget or MAX_BUDGET

    async def open_session(
        self,
        given: RowRequest,
        face: SessionKind,
        *,
        name: str | None = None,
        left: Session | None = None,
        prompted: bool = True,
    ) -> Session:
        """Give a new session of an episode of the *given* row; a client may *name* it. Raises `Refused`.

        One that its client *left* for it is still there for the verdict: who asked for another may have been a policy.
        """
        await self.sessions.check_capacity(name)
        played = EpisodeRunner(self.environment, self._limit_budget(given, face))
        await play_without_nulls(
            given.row, lambda row: played.open(row, seed=given.seed, id=given.id, repeat=given.repeat)
        )
        try:
            session = await self.sessions.open(played, name=name)
        except BaseException:
            await played.close()
            raise
        opening = SessionOrigin(
            given.identity, given.seed, typed=face == "typed", prompted=prompted, seed_given=given.seed_given
        )
        session.extras |= {"face": face, "opening": opening}
        if left is not None and not is_judged(left):
            before = [*self._earlier_sessions(left), left]
            session.extras["before"] = (
                before if len(before) <= MAX_EARLIER_SESSIONS else [before[0], *before[1 - MAX_EARLIER_SESSIONS :]]
            )
        return session

    @asynccontextmanager
    async def lock_session(self, session: Session | None, *faces: SessionKind) -> AsyncIterator[Session]:
        """Have *session* to oneself, if it is open and played by one of these *faces*; raises `Refused`."""
        if session is None:
            sentence = f"there is no session: POST a row to {OPENING_PATHS[faces[0]]} first, then send its cookie"
            raise RequestRejected(409, sentence, **SESSION_LOST)
        # Tools bring nothing but their arguments: whose they are, the session knows.
        context.set_rollout_id(session.sitting.episode.id if session.sitting.episode else "")
        if session.extras["face"] not in faces:
            raise RequestRejected(
                409, f"this session was opened by {OPENING_PATHS[session.extras['face']]}: go on as that has it"
            )
        async with session.lock:
            if self.sessions.find_by_token(session.token) is None:
                raise RequestRejected(409, "the session has been closed meanwhile; open another", **SESSION_LOST)
            session.sitting.restart_deadline()
            try:
                yield session
            finally:
                # In use until now.
                self.sessions.find_by_token(session.token)

    @asynccontextmanager
    async def lock_playing_session(self, session: Session | None, *faces: SessionKind) -> AsyncIterator[Session]:
        """Have *session* to oneself as `held` does, to go on in it: one that was left or judged is over."""
        async with self.lock_session(session, *faces) as mine:
            if mine.left:
                raise RequestRejected(409, "the session has been closed; open another", **SESSION_LOST)
            if "judged" in mine.extras:
                raise RequestRejected(
                    409, "the session has been judged: nothing happens in it any more; open another", **SESSION_JUDGED
                )
            yield mine

    async def leave_session(self, session: Session, *, trusted: bool) -> None:
        """Close *session*; unless *trusted*, it may be a policy that wants it so, and a verdict is waited for."""
        if trusted or is_judged(session):
            await self.sessions.close(session)
        else:
            self.sessions.close_soon(session)

    async def call_tool(self, session: Session, name: str, arguments: str) -> tuple[Item, TurnResult]:
        """Give what answers a tool call in this session's episode, which its caller holds, and what came of it."""
        call = responses.build_function_call(name, arguments)
        if session.sitting.is_over:
            return responses.build_function_call_output(call["call_id"], NOT_RUN_OUTPUT), TurnResult(ended="done")
        taken = await session.sitting.apply_response({"output": [call]})
        if not taken.items:
            raise RequestRejected(503, f"the tool {name!r} had no time left", retry_after=1)
        return taken.items[0], taken

    async def judge(
        self, given: RowRequest, items: Sequence[Item], ended: EndReason, session: Session | None
    ) -> tuple[JudgedEpisode, Session | None, str | None]:
        """Judge *items* as the episode of the *given* row.

        A session of the same row brings its state; judging does not change that state, but the session is over.
        Without a session the state is rebuilt where the verdict takes it.

        Returns:
            The verdict, the session that was judged, and why the one of the cookie was not.

        Raises:
            Refused: another response was judged in the session before, or *session* cannot be the one that *items* were
                played in and the verdict takes the state: a state that was rebuilt might be another.
        """
        if session is None:
            return await self._judge_without_session(given, items, ended), None, None
        async with self.lock_session(session, "tools", "typed", "turns"):
            found, why = self._find_played_session(session, given, items)
            if found is session:
                return await self._judge_session(session, given, items, ended), session, why
        if found is None:
            return await self._judge_without_session(given, items, ended), None, why
        async with self.lock_session(found, "tools", "typed", "turns"):
            return await self._judge_session(found, given, items, ended), found, why

    def _find_played_session(
        self, session: Session, given: RowRequest, items: Sequence[Item]
    ) -> tuple[Session | None, str | None]:
        """Return the session in which *items* were played: *session*, or one that its client left for it.

        Raises:
            BadRow: The given row does not fit the environment.
            Refused: None of them is the one, and the verdict takes the state.
        """
        match = find_session([*self._earlier_sessions(session), session], given, items, self.environment)
        if match.session is not None:
            return match.session, match.why
        # A session of another row that has its verdict is over: its cookie is left from before.
        left_over = not match.row_has_session and is_judged(session)
        if self.environment.needs_replay and not left_over:
            parse_task(given.row, self.environment)
            raise RequestRejected(409, f"{match.why} {MISMATCH_ADVICE}", **SESSION_MISMATCH)
        return None, f"{match.why} {JUDGED_WITHOUT_MESSAGE}"

    def _earlier_sessions(self, session: Session) -> list[Session]:
        before: list[Session] = session.extras.get("before", [])
        return [each for each in before if self.sessions.is_open(each) and not is_judged(each)]

    async def _judge_session(
        self, session: Session, given: RowRequest, items: Sequence[Item], ended: EndReason
    ) -> JudgedEpisode:
        _fix_judged_response(session, items, ended)
        episode = session.sitting.episode
        assert episode is not None, "it has been opened"
        opening: SessionOrigin = session.extras["opening"]
        copy = _copy_episode(episode, self.environment, given, prompted=opening.prompted)
        if session.extras["face"] != "turns":
            # No endpoint brings a reply: those of an author who answers them are played now.
            await self.environment.replay_into(copy, judging.drop_unfinished_turn(items, ended), calls=False)
        return await judging.verify_episode(self.environment, copy, items, ended)

    async def _judge_without_session(self, given: RowRequest, items: Sequence[Item], ended: EndReason) -> JudgedEpisode:
        seconds = limit_budget(given.budget, self._budget).seconds

        async def judge(row: Row) -> JudgedEpisode:
            return await judging.verify_transcript(
                self.environment, row, items, seed=given.seed, repeat=given.repeat, ended=ended, seconds=seconds
            )

        return await play_without_nulls(given.row, judge)

    def _limit_budget(self, given: RowRequest, face: SessionKind) -> Budget:
        budget = limit_budget(given.budget, self._budget)
        # Each call comes by itself: how many turns they were is known to the client alone.
        return budget if face == "turns" else budget.model_copy(update={"turns": MAX_BUDGET.turns})


def _fix_judged_response(session: Session, items: Sequence[Item], ended: EndReason) -> None:
    """Have *session* be judged for these *items* alone, however often it is asked for; raises `Refused`."""
    mark = hashlib.sha256(dump_json([ended, *items])).digest()
    if session.extras.setdefault("judged", mark) != mark:
        raise RequestRejected(
            409, "the session was judged with another response: open another session for this one", **SESSION_JUDGED
        )


def _copy_episode(episode: Episode, environment: Environment, given: RowRequest, *, prompted: bool) -> Episode:
    """Give a copy of *episode* to be judged; where it was not *prompted*, the *given* row's prompt opens it."""
    opening = list(episode.transcript.opening)
    task = episode.task if prompted else parse_task(given.row, environment)
    return replace(
        episode,
        task=task,
        state=calls.copy_state(episode.state) if environment.needs_replay else episode.state,
        transcript=Transcript(opening=opening if prompted else [*task.input, *opening]),
        deadline=asyncio.get_running_loop().time() + MAX_BUDGET.seconds,
    )
