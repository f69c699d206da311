"""The canonical form of a row: it decides the seed, the session of the row, and whether a request is a repeat.

Tables (pandas, Arrow, `datasets`) add a null for each member that a row lacks; clients add or drop nulls on the way.
The canonical form therefore leaves out every member that is null, at every depth. Each part of the server that compares
or hashes rows uses the functions of this module and nothing else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gymsdk.metrics import TASK_INDEX
from gymsdk.rollouts.jobs import Job, seed_of
from gymsdk.transcript import text_of
from gymsdk.types import Row
from gymsdk.values import ordered

ROUTING_FIELDS = frozenset(
    {"responses_create_params", "response", "gymsdk", "agent_ref", "task_source", "skills_ref", "capture_rollout_id"}
)
"""Fields that route a row or tell of its play, beside those that begin with `_ng_`; the rest is the environment's."""

SCALARS = frozenset({str, int, float, bool, type(None)})


def canonical(value: Any) -> Any:
    """Return *value*, which is JSON, without the members of its objects that are null, at every depth.

    An element of an array that is null stays: its place matters. The walk does not recurse, so depth is no limit.
    """
    holder = [value]
    pending: list[Any] = [holder]
    while pending:
        container = pending.pop()
        for key, each in container.items() if isinstance(container, dict) else enumerate(container):
            if isinstance(each, dict):
                copied: Any = {name: member for name, member in each.items() if member is not None}
            elif isinstance(each, list) and not SCALARS.issuperset(map(type, each)):
                copied = list(each)
            else:
                continue
            container[key] = copied
            pending.append(copied)
    return holder[0]


def digest(row: Row) -> str:
    """Return a digest that is the same for rows, or whole requests, with the same canonical form."""
    return hashlib.sha256(ordered(canonical(row))).hexdigest()


@dataclass(frozen=True, slots=True)
class RowIdentity:
    """What a row is, whoever carries it: its environment's own *fields*, its *prompt*, and its *task_index*, if any.

    All of them are in canonical form. The *prompt* is `None` where the row has none.
    """

    fields: Row
    prompt: list[Any] | None
    task_index: int | None

    @classmethod
    def of_row(cls, row: Row) -> RowIdentity:
        """Return the identity of *row*."""
        index = row.get(TASK_INDEX)
        return cls(
            fields=_own_fields(row),
            prompt=_prompt(row),
            task_index=index if isinstance(index, int) and not isinstance(index, bool) else None,
        )

    def seed(self, environment: str, *, repeat: int = 0) -> int:
        """Return the seed of an episode of this row in *environment*: its task's, or one that its fields decide."""
        if self.task_index is not None:
            return seed_of(0, Job(environment, self.task_index, repeat, self.fields))
        return self.seed_of_fields(environment)

    def seed_of_fields(self, environment: str) -> int:
        """Return the seed that the row's own fields decide, whatever its task index."""
        found = hashlib.sha256(environment.encode() + b":" + ordered(self.fields)).digest()
        return int.from_bytes(found[:4], "big") >> 1


def _own_fields(row: Mapping[str, Any]) -> Row:
    fields: Row = canonical(
        {key: value for key, value in row.items() if key not in ROUTING_FIELDS and not key.startswith("_ng_")}
    )
    return fields


def _prompt(row: Row) -> list[Any] | None:
    """Return the items that the model is to answer, in one form however the row writes them."""
    params = row.get("responses_create_params")
    items = params.get("input") if isinstance(params, dict) else None
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    return [_plain_message(canonical(item)) for item in items] if isinstance(items, list) else None


def _plain_message(item: Any) -> Any:
    if not isinstance(item, dict) or item.get("type", "message") != "message":
        return item
    kept = {key: value for key, value in item.items() if key not in {"type", "status", "id", "content"}}
    content = item.get("content")
    parts = isinstance(content, list) and all(isinstance(part, dict) for part in content)
    return kept | {"content": (text_of(content) if parts else "") or content}
