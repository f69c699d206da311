"""Matching: whether a session is one of the row that a response is to be judged for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gymsdk.environment import Environment
from gymsdk.metrics import TASK_INDEX
from gymsdk.servers.sessions.held import Session
from gymsdk.servers.sessions.intake import Given, own, prompt_of, seed_for, without_nulls
from gymsdk.transcript import Item
from gymsdk.types import Row

OTHER = "the session of the cookie is one of another row: this was judged without it"
UNSEEN = "the session of the cookie has seen none of the calls: this was judged without it"
ABANDONED = "the session of the cookie was opened in the middle of another of this row: that one was judged"


@dataclass(frozen=True, slots=True)
class Brought:
    """What a session was opened with: the row's *own* fields, its *prompt*, the *seed*, and whether by an index."""

    own: Row
    prompt: list[Any] | None
    seed: int
    indexed: bool
    typed: bool

    @classmethod
    def by(cls, given: Given, *, typed: bool = False, prompted: bool = True) -> Brought:
        """Give what the *given* row brings."""
        prompt = prompt_of(given.row) if prompted else None
        return cls(_own(given.row), prompt, given.seed, TASK_INDEX in given.row, typed)


def fits(session: Session, given: Given, environment: Environment) -> bool:
    """Whether all that opened *session* is in the *given* row too; raises `BadRow` where that is none."""
    brought: Brought = session.kept["brought"]
    theirs, prompt = _own(given.row), prompt_of(given.row)
    if any(key not in theirs or theirs[key] != value for key, value in brought.own.items()):
        return False
    if brought.prompt is not None and prompt is not None and brought.prompt != prompt:
        return False
    return _seeded(brought, given, environment.name) and _same(session, given, environment, theirs.keys() - brought.own)


def saw(session: Session, items: Sequence[Item]) -> bool:
    """Whether *session* has seen anything of what was called in *items*, if anything was."""
    episode = session.sitting.episode
    called = any(item.get("type") == "function_call_output" for item in items)
    return episode is not None and (bool(episode.transcript.items) or not called)


def saw_all(session: Session, items: Sequence[Item]) -> bool:
    """Whether *session* has seen every call in *items*, as far as its client could bring them."""
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


def _own(row: Row) -> Row:
    bare: Row = without_nulls(own(row))
    return bare


def _seeded(brought: Brought, given: Given, name: str) -> bool:
    """Whether the *given* row has the seed that the session was opened with."""
    if given.said is not None and "seed" in given.said:
        return given.seed == brought.seed
    if TASK_INDEX not in given.row:
        return brought.seed == seed_for(brought.own, name)
    # The typed body has no place for an index.
    return given.seed == brought.seed or (brought.typed and not brought.indexed)


def _same(session: Session, given: Given, environment: Environment, more: set[str]) -> bool:
    """Whether what the row has *more* is, where the schema knows it, what the session took it for."""
    declared = more & environment.task_type.model_fields.keys()
    episode = session.sitting.episode
    if not declared or episode is None:
        return True
    task = environment.read(without_nulls(given.row))
    return all(getattr(episode.task, key, None) == getattr(task, key, None) for key in declared)
