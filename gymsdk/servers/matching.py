"""Finds the session in which a policy played a response, by the row and by the tool calls that a session received."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from gymsdk import responses
from gymsdk.concurrency import INTERRUPTS
from gymsdk.edge.errors import RequestRejected
from gymsdk.environment import Environment
from gymsdk.jsonl import freeze_json, parse_json
from gymsdk.models import recordings
from gymsdk.servers.requests import RowRequest, SessionOrigin, parse_task, to_canonical
from gymsdk.servers.sessions import Session
from gymsdk.tools import InvalidArguments
from gymsdk.types import Item, ToolCall

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
JUDGED_WITHOUT_MESSAGE = "The response was judged without the session."
MISMATCH_ADVICE = (
    "The verdict of this environment depends on the session, so nothing was judged. Open a session for this row and"
    " play the row there, or send the row without the cookie to have it judged without a session."
)

SESSION_MISMATCH: dict[str, Any] = {"stage": "verify", "kind": "session_mismatch", "retryable": False}
"""Fields of a rejection when the response was not played in the cookie's session."""


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


def find_played_session(
    candidates: Sequence[Session], request: RowRequest, items: Sequence[Item], environment: Environment
) -> tuple[Session | None, str | None]:
    """Return the session in which a response was played, and why that is not the newest; see `find_session`.

    Raises:
        BadRow: The row does not fit the environment.
        RequestRejected: No session matches, and the verdict depends on the state.
    """
    match, newest = find_session(candidates, request, items, environment), candidates[-1]
    if match.session is not None:
        return match.session, match.reason
    # A judged session of another row is over; the client has only kept its cookie.
    is_stale = not match.row_has_session and newest.is_judged
    if environment.needs_replay and not is_stale:
        parse_task(request.row, environment)
        raise RequestRejected(409, f"{match.reason} {MISMATCH_ADVICE}", **SESSION_MISMATCH)
    return None, f"{match.reason} {JUDGED_WITHOUT_MESSAGE}"


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
            for _, actions in responses.iter_played_turns(items)
            for action in actions
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
        """Return the offered calls that `sessions` did not receive and that agents do send."""
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
        return call.name, freeze_json(to_canonical(parse_json(text or b"{}")))
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


def _find_sessions_of_row(
    candidates: Sequence[Session], request: RowRequest, environment: Environment
) -> tuple[list[Session], str | None]:
    """Return the candidates that were opened with the row, and how the row of the last candidate differs, if it does.

    A session with a row that differs only in fields that clients add or leave out counts if no other matches.
    """
    difference: str | None = None
    for exact in (True, False):
        differences = [_describe_difference(session, request, environment, exact=exact) for session in candidates]
        same_row = [session for session, found in zip(candidates, differences, strict=True) if found is None]
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
