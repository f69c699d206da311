"""The store of open sessions, and the search for the session in which a response was played."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any

from gymsdk import responses
from gymsdk.concurrency import INTERRUPTS
from gymsdk.config.model import DEFAULT_MAX_SESSIONS, DEFAULT_TTL_SECONDS
from gymsdk.environment import Environment
from gymsdk.episode import EpisodeRunner
from gymsdk.jsonl import parse_json
from gymsdk.memory import EpisodeCounter
from gymsdk.models import recordings
from gymsdk.servers.errors import RequestRejected, ServerOverloaded
from gymsdk.servers.limits import Claims
from gymsdk.servers.middleware import RESERVED_PATHS
from gymsdk.servers.request_state import Scope, get_state
from gymsdk.servers.requests import EpisodeId, RowIdentity, RowRequest, parse_task, to_canonical
from gymsdk.servers.session_clients import ClosedIds, SessionClient, check_episode
from gymsdk.tools import InvalidArguments
from gymsdk.types import Episode, Item, ToolCall

RETRY_AFTER_SECONDS = 5.0
"""`Retry-After` in seconds when no further session can be opened."""

LEFT_SESSION_SECONDS = 600.0
"""Seconds from the last use to the close of a session that its client left without a request for a verdict."""

CLOSE_GRACE_SECONDS = 1.0
"""Seconds that a sweep waits for the sessions that it closes; slower sessions close in the background."""

MAX_CLOSED_NAMES = 100_000
"""How many names of closed sessions are remembered; a session with such a name is not opened again."""


@dataclass(slots=True, eq=False)
class Session:
    """One client's open episode.

    Attributes:
        token: The secret in the client's cookie.
        runner: The running episode.
        name: The client's own id of the session, if it has one.
        client: The client that opened the session under its own id, if it has one.
        key: A second secret that only allows tool calls, if one was issued.
        last_used: When the session was last used, on the store's clock.
        left: Whether the client left the session; it then closes soon, or when another session needs its place.
        lock: Keeps the session's calls from overlapping.
        extras: Further data of the server.
        calls: The tool calls received for this session in order of arrival, including rejected calls.
    """

    token: str
    runner: EpisodeRunner
    name: str | None = None
    client: SessionClient | None = None
    key: str | None = None
    last_used: float = 0.0
    left: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    extras: dict[str, Any] = field(default_factory=dict)
    calls: list[ToolCall] = field(default_factory=list)


class SessionStore:
    """The open sessions of one server.

    Args:
        ttl: Seconds after its last use when a session expires.
        max_sessions: The largest number of open sessions.
        instance: The id of this instance, if several servers have the same name; each token then starts with it.
        clock: Returns the time in seconds.
        claims: Keeps the ids of the client's sessions claimed while the sessions are open, and some time longer.
    """

    def __init__(
        self,
        *,
        ttl: float = DEFAULT_TTL_SECONDS,
        max_sessions: int = DEFAULT_MAX_SESSIONS,
        instance: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        claims: Claims | None = None,
    ) -> None:
        self._claims = claims
        self._instance = instance
        self._ttl = ttl
        self._max_sessions = max_sessions
        self._clock = clock
        self._open: OrderedDict[str, Session] = OrderedDict()
        self._named: dict[str, Session] = {}
        self._keyed: dict[str, Session] = {}
        self._closed_names = ClosedIds(MAX_CLOSED_NAMES)
        self._closing: set[asyncio.Task[None]] = set()
        self._counter = EpisodeCounter()
        self._left: dict[Session, None] = {}

    def __len__(self) -> int:
        """Return the number of open sessions."""
        return len(self._open)

    async def open(
        self, runner: EpisodeRunner, *, name: str | None = None, client: SessionClient | None = None
    ) -> Session:
        """Store an open episode under a new token.

        Raises:
            RequestRejected: The store is full, or the name was used before.
        """
        await self.check_capacity(name, client)
        session = Session(self._new_token(), runner, name, client, last_used=self._clock())
        self._open[session.token] = session
        self._counter.begin()
        if name is not None:
            self._named[name] = session
            if self._claims is not None:
                self._claims.hold(name)
        return session

    async def check_capacity(self, name: str | None = None, client: SessionClient | None = None) -> None:
        """Check that another session can be opened, under `name` if given.

        Raises:
            RequestRejected: The store is full, or the name was used before.
        """
        episode = client.episode if client else None
        if name is not None and (name in self._named or not self._closed_names.may_open(name, episode)):
            raise RequestRejected(409, f"a session {name!r} exists or existed; choose another id")
        if len(self._open) >= self._max_sessions:
            await self.sweep()
        if len(self._open) >= self._max_sessions:
            await self._await_closed(list(self._left)[:1])
        if len(self._open) >= self._max_sessions:
            raise ServerOverloaded(
                f"all {self._max_sessions} sessions are in use; close some, or try again later",
                retry_after=RETRY_AFTER_SECONDS,
            )

    def find_by_token(self, token: str | None) -> Session | None:
        """Return the session with this token and mark it as used, or `None`."""
        session = self._open.get(token or "")
        if session is not None:
            session.last_used = self._clock()
            self._open.move_to_end(session.token)
        return session

    def find_by_request(self, scope: Scope) -> Session | None:
        """Return the session of a request's cookie and mark it as used, or `None`.

        Raises:
            RequestRejected: The path of the request names another rollout than the session's.
        """
        return _confirm(self.find_by_token(get_state(scope).token), scope)

    def is_open(self, session: Session) -> bool:
        """Return whether the session is open, without marking it as used."""
        return session.token in self._open

    def find_by_name(self, name: str) -> Session | None:
        """Return the open session that the client named `name`."""
        return self._named.get(name)

    def issue_key(self, session: Session) -> str:
        """Return the session's key, a second secret that only allows tool calls."""
        if session.key is None:
            session.key = self._new_token()
            self._keyed[session.key] = session
        return session.key

    def find_by_key(self, key: str | None, scope: Scope | None = None) -> Session | None:
        """Return the open session with this key and mark it as used, or `None`.

        Raises:
            RequestRejected: The path of the request of *scope* names another rollout than the session's.
        """
        session = self._keyed.get(key or "")
        found = None if session is None else self.find_by_token(session.token)
        return found if scope is None else _confirm(found, scope)

    def find_to_close(self, name: str, episode: EpisodeId | None) -> Session | None:
        """Return the session to close by the client's id, and keep that id from being opened again.

        Raises:
            RequestRejected: The id belongs to another episode.
        """
        session = self._named.get(name)
        if session is None:
            self._closed_names.find_reply(name, episode)
            self._closed_names.fence(name, episode)
        elif session.client is not None:
            check_episode(name, session.client.episode, episode)
        return session

    def _new_token(self) -> str:
        secret = secrets.token_urlsafe(24)
        return secret if self._instance is None else f"{self._instance}.{secret}"

    async def close(self, session: Session) -> None:
        """Close a session's episode and forget the session; repeated calls have no effect.

        The close runs to its end even if the caller is cancelled.
        """
        if (closing := self._begin_close(session)) is not None:
            await asyncio.shield(closing)

    def _begin_close(self, session: Session) -> asyncio.Task[None] | None:
        if self._open.pop(session.token, None) is None:
            return None
        self._left.pop(session, None)
        if session.name is not None:
            self._named.pop(session.name, None)
            self._closed_names.add(session.name, session.client.episode if session.client else None)
            if self._claims is not None:
                self._claims.let_go(session.name, is_kept=True)
        if session.key is not None:
            self._keyed.pop(session.key, None)
        closing = asyncio.create_task(self._close_episode(session))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        return closing

    async def _close_episode(self, session: Session) -> None:
        try:
            async with session.lock:
                await session.runner.close()
        finally:
            self._counter.end()

    def close_soon(self, session: Session) -> None:
        """Mark a session as left: it closes after `LEFT_SESSION_SECONDS`, or when another session needs its place."""
        session.left = True
        if self.is_open(session):
            self._left[session] = None

    async def sweep(self) -> None:
        """Close expired sessions, except sessions with a call under way."""
        now, shortest_ttl = self._clock(), min(LEFT_SESSION_SECONDS, self._ttl)
        # The open sessions are in the order of their last use.
        unused = takewhile(lambda session: session.last_used <= now - shortest_ttl, self._open.values())
        expired = [session for session in unused if session.left or session.last_used <= now - self._ttl]
        await self._await_closed([session for session in expired if not session.lock.locked()])

    async def aclose(self) -> None:
        """Close all sessions; a cancellation abandons the sessions that are still closing."""
        for session in list(self._open.values()):
            self._begin_close(session)
        await asyncio.gather(*self._closing)

    async def _await_closed(self, sessions: Iterable[Session]) -> None:
        # Sessions close concurrently, because each may take as long as the time limit of the `close` hook.
        closing = [task for session in sessions if (task := self._begin_close(session)) is not None]
        if closing:
            await asyncio.wait(closing, timeout=CLOSE_GRACE_SECONDS)


def _confirm(session: Session | None, scope: Scope) -> Session | None:
    if session is not None and session.client is not None:
        session.client.confirm(scope)
    return session


OTHER_ROW_MESSAGE = "The cookie's session was not opened with this row: {difference}."
NO_CALL_RECEIVED_MESSAGE = "None of the response's tool calls was sent to the cookie's session."
CALLS_NOT_RECEIVED_MESSAGE = (
    "Some of the response's tool calls were not sent to the cookie's session; the first is a call of {name!r}."
)
ABANDONED_MESSAGE = (
    "The cookie's session was opened after the session that played this response. The earlier session was judged."
)


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


def is_judged(session: Session) -> bool:
    """Return whether `/verify` judged the session, or the runner has a result."""
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
        episode = _get_episode(session)
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
    origin: SessionOrigin = session.extras["origin"]
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
    origin: SessionOrigin = session.extras["origin"]
    added = request.identity.fields.keys() - origin.identity.fields.keys()
    declared = sorted(added & environment.task_type.model_fields.keys())
    if not declared:
        return None
    session_task, task = _get_episode(session).task, parse_task(request.row, environment)
    for name in declared:
        if getattr(session_task, name, None) != getattr(task, name, None):
            return f"the field {name!r} differs"
    return None


def _get_episode(session: Session) -> Episode:
    episode = session.runner.episode
    assert episode is not None, "a session is opened with its episode"
    return episode
