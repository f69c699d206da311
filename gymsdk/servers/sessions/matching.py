"""Which session a response was played in: the session of its row that received its tool calls."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from gymsdk import recordings, turns
from gymsdk.complaints import INTERRUPTS
from gymsdk.environment import Environment
from gymsdk.servers.door.routing import RESERVED
from gymsdk.servers.sessions.held import Session
from gymsdk.servers.sessions.identity import RowIdentity, canonical
from gymsdk.servers.sessions.intake import Given, task_of
from gymsdk.tools import WrongArguments
from gymsdk.transcript import Item, ToolCall
from gymsdk.types import Episode
from gymsdk.values import parsed

OTHER_ROW = "The cookie's session was not opened with this row: {difference}."
NO_CALL_SEEN = "None of the response's tool calls was sent to the cookie's session."
CALLS_UNSEEN = (
    "Some of the response's tool calls were not sent to the cookie's session; the first is a call of {name!r}."
)
ABANDONED = (
    "The cookie's session was opened after the session that played this response. The earlier session was judged."
)

JUDGED_WITHOUT = "The response was judged without the session."
WHAT_TO_DO = (
    "The verdict of this environment depends on the session, so nothing was judged. Open a session for this row and"
    " play the row there, or send the row without the cookie to have it judged without a session."
)


@dataclass(frozen=True, slots=True)
class Opening:
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


def find(candidates: Sequence[Session], given: Given, items: Sequence[Item], environment: Environment) -> Match:
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
    fitting, differs = _of_row(candidates, given, environment)
    if not fitting:
        return Match(None, OTHER_ROW.format(difference=differs), row_has_session=False)
    calls = ResponseCalls.from_items(items, fitting[-1], environment)
    if newest in fitting and calls.is_complete_in(newest):
        return Match(newest)
    shares = [each for each in fitting if calls.any_seen([each])]
    # A call that is no tool's may have opened any of the newer sessions, which got the calls from then on.
    played = candidates[candidates.index(shares[0]) :] if shares and calls.others else fitting
    unseen = calls.unseen(played)
    if unseen or not shares:
        name = unseen[0].name if unseen else ""
        return Match(None, CALLS_UNSEEN.format(name=name) if shares else NO_CALL_SEEN)
    complete = [each for each in shares if not calls.unseen([each])]
    # A policy may have opened the newer session by a call that is no tool's: it must not choose where it is judged.
    found = complete[-1] if complete and not calls.others else shares[0]
    return Match(found, None if found is newest else ABANDONED)


def over(session: Session) -> bool:
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
        episode = _episode(session)
        names = {tool.get("name") for tool in episode.tools} - RESERVED
        answered = [
            action
            for span in turns.spans(items)
            for action in turns.played(items, span)
            if isinstance(action, ToolCall)
        ]
        offered = [call for call in answered if call.name in names and call.parsed() is not None]
        return cls(offered, [call for call in answered if call.name not in names], environment)

    def is_complete_in(self, session: Session) -> bool:
        """Whether *session* received every call, also those that are no tool's."""
        missing, _ = _paired(self.others, session.calls, lambda call: call.name)
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
        missing, rest = _paired(self.offered, recorded, _as_written)
        if missing and rest:
            missing, _ = _paired(missing, rest, partial(_as_received, environment=self.environment))
        return missing

    def _sent(self, calls: Sequence[ToolCall]) -> list[ToolCall]:
        return [call for call in calls if _as_received(call, self.environment) is not None]


def _paired(
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


def _as_written(call: ToolCall) -> Hashable:
    """Return the name and the arguments of *call*, without nulls, however a client spaces and orders them."""
    text = call.arguments.encode("utf-8", "replace")
    try:
        return call.name, _frozen(canonical(parsed(text or b"{}")))
    except (ValueError, RecursionError):
        return call.name, text


def _as_received(call: ToolCall, environment: Environment) -> Hashable | None:
    """Return the name and what the tool receives for the arguments, `None` where the tool refuses them."""
    tool = environment.tools.get(call.name)
    if tool is None:
        return _as_written(call)
    try:
        return call.name, tool.received(call.arguments)
    except WrongArguments:
        return None
    except INTERRUPTS:
        raise
    except BaseException:  # noqa: BLE001  # code of the author's may raise anything as it reads arguments
        # Agents send such a call, and the server answers with a failure.
        return _as_written(call)


def _frozen(value: Any) -> Hashable:
    """Return *value*, which is JSON, as something that can be hashed; 1 and 1.0 are equal, 1 and true are not."""
    if isinstance(value, dict):
        return frozenset((key, _frozen(each)) for key, each in value.items())
    if isinstance(value, list):
        return tuple(map(_frozen, value))
    return (bool, value) if isinstance(value, bool) else value


def _of_row(candidates: Sequence[Session], given: Given, environment: Environment) -> tuple[list[Session], str | None]:
    """Return those of *candidates* that were opened with the *given* row, and what differs in the last candidate.

    A session whose row differs only in what clients add or leave out counts if no other session fits.
    """
    differs: str | None = None
    for exact in (True, False):
        differences = [_difference(each, given, environment, exact=exact) for each in candidates]
        fitting = [each for each, found in zip(candidates, differences, strict=True) if found is None]
        if fitting:
            return fitting, differences[-1]
        differs = differences[-1]
    return [], differs


def _difference(session: Session, given: Given, environment: Environment, *, exact: bool) -> str | None:
    """Return what opened *session* and is not in the *given* row, `None` where the session is one of that row.

    Unless *exact*, the agent may have put a system prompt before the row's prompt, and one side may lack the task
    index, which some clients send only with one of their requests.
    """
    opening: Opening = session.extras["opening"]
    ours, theirs = opening.identity, given.identity
    for name, value in ours.fields.items():
        if name not in theirs.fields or theirs.fields[name] != value:
            return f"the field {name!r} differs"
    if opening.prompted and not _has_prompt(ours.prompt, theirs.prompt, exact=exact):
        return "the prompt differs"
    if not _has_seed(opening, given, exact=exact):
        return "the seed or the task index differs"
    return _added_field(session, given, environment)


def _has_prompt(ours: list[Any] | None, theirs: list[Any] | None, *, exact: bool) -> bool:
    if ours is None or theirs is None or ours == theirs:
        return True
    return not exact and recordings.adds_system_prompt(theirs, ours)


def _has_seed(opening: Opening, given: Given, *, exact: bool) -> bool:
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


def _added_field(session: Session, given: Given, environment: Environment) -> str | None:
    """Return what differs in the fields that the row has beside those of the session, where the schema knows them."""
    opening: Opening = session.extras["opening"]
    added = given.identity.fields.keys() - opening.identity.fields.keys()
    declared = sorted(added & environment.task_type.model_fields.keys())
    if not declared:
        return None
    ours, task = _episode(session).task, task_of(given.row, environment)
    for name in declared:
        if getattr(ours, name, None) != getattr(task, name, None):
            return f"the field {name!r} differs"
    return None


def _episode(session: Session) -> Episode:
    episode = session.sitting.episode
    assert episode is not None, "a session is opened with its episode"
    return episode
