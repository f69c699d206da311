"""Which session a response belongs to: whether it was opened for the row, and whether it has seen the calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gymsdk import turns
from gymsdk.environment import Environment
from gymsdk.servers.sessions.held import Session
from gymsdk.servers.sessions.identity import RowIdentity
from gymsdk.servers.sessions.intake import Given, task_of
from gymsdk.transcript import Item, ToolCall
from gymsdk.types import Episode

OTHER_ROW = "the session of the cookie is one of another row"
UNSEEN_CALLS = "the session of the cookie has seen none of the calls"
JUDGED_WITHOUT = "this was judged without it"
ABANDONED = "the session of the cookie was opened in the middle of another of this row: that one was judged"

WHAT_TO_DO = "open a session for this row and play it there, or send the row without the cookie to have it judged alone"


@dataclass(frozen=True, slots=True)
class Opening:
    """What a session was opened with: the *identity* of its row, its *seed*, and whether by the *typed* body.

    *prompted* says whether the row had a prompt: the typed body may leave the prompt to the agent.
    """

    identity: RowIdentity
    seed: int
    typed: bool = False
    prompted: bool = True


def difference(session: Session, given: Given, environment: Environment) -> str | None:
    """Return what opened *session* and is not in the *given* row, `None` where the session is one of that row.

    Raises:
        BadRow: the row does not fit the environment.
    """
    opening: Opening = session.kept["opening"]
    ours, theirs = opening.identity, given.identity
    for name, value in ours.fields.items():
        if name not in theirs.fields or theirs.fields[name] != value:
            return f"the field {name!r} differs"
    if opening.prompted and ours.prompt is not None and theirs.prompt is not None and ours.prompt != theirs.prompt:
        return "the prompt differs"
    if not _has_seed(opening, given, environment.name):
        return "the seed or the task index differs"
    return _added_field(session, given, environment)


def saw_calls(session: Session, items: Sequence[Item]) -> bool:
    """Whether *session* has seen any of the calls in *items* that its client had to send, if there are any."""
    episode = session.sitting.episode
    return episode is not None and (bool(episode.transcript.items) or not _has_sent_calls(episode, items))


def saw_all_calls(session: Session, items: Sequence[Item]) -> bool:
    """Whether *session* has seen every call in *items*, as far as its client could send them."""
    calls, episode = _calls(items), session.sitting.episode
    if session.kept["face"] == "turns":
        return episode is not None and calls == _calls(episode.transcript.items)
    asked: int = session.kept.get("asked", 0)
    return asked >= len(calls)


def over(session: Session) -> bool:
    """Whether *session* has its verdict."""
    return "judged" in session.kept or session.sitting.ending is not None


def _calls(items: Sequence[Item]) -> list[tuple[object, object]]:
    return [(item.get("name"), item.get("arguments")) for item in items if item.get("type") == "function_call"]


def _has_sent_calls(episode: Episode, items: Sequence[Item]) -> bool:
    """Whether *items* hold a call that every agent sends to the server.

    Agents answer some calls without asking the server: of an unknown tool, or with arguments that are no JSON object.
    """
    offered = {tool.get("name") for tool in episode.tools}
    return any(
        isinstance(action, ToolCall) and action.name in offered and action.parsed() is not None
        for span in turns.spans(items)
        for action in turns.played(items, span)
    )


def _has_seed(opening: Opening, given: Given, name: str) -> bool:
    """Whether the *given* row has the seed that the session was opened with."""
    if given.said is not None and "seed" in given.said:
        return given.seed == opening.seed
    if given.identity.task_index is None:
        return opening.seed == opening.identity.seed_of_fields(name)
    # The typed body has no place for an index.
    return given.seed == opening.seed or (opening.typed and opening.identity.task_index is None)


def _added_field(session: Session, given: Given, environment: Environment) -> str | None:
    """Return what differs in the fields that the row has beside those of the session, where the schema knows them."""
    opening: Opening = session.kept["opening"]
    added = given.identity.fields.keys() - opening.identity.fields.keys()
    declared, episode = sorted(added & environment.task_type.model_fields.keys()), session.sitting.episode
    if not declared or episode is None:
        return None
    task = task_of(given.row, environment)
    for name in declared:
        if getattr(episode.task, name, None) != getattr(task, name, None):
            return f"the field {name!r} differs"
    return None
