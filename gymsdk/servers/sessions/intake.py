"""Intake: what a request says of the row it brings: its seed, its budget, its rollout, its response."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

from pydantic import ValidationError

from gymsdk import complaints, trail
from gymsdk.environment import Environment
from gymsdk.errors import BadRow
from gymsdk.metrics import ROLLOUT_INDEX, TASK_INDEX
from gymsdk.responses import is_incomplete, is_response
from gymsdk.rollouts.jobs import Job, seed_of
from gymsdk.rollouts.lines import unplayed
from gymsdk.servers.app import Refused
from gymsdk.servers.door.routing import ID
from gymsdk.sitting import Budget
from gymsdk.transcript import Ended, Item, text_of
from gymsdk.types import Playable, Row
from gymsdk.values import ordered

T = TypeVar("T")

ROLLOUT_ID = "_ng_rollout_id"
"""How a client names the rollout that a row is played for; an alias is `capture_rollout_id`."""

ROUTING = frozenset(
    {"responses_create_params", "response", "gymsdk", "agent_ref", "task_source", "skills_ref", "capture_rollout_id"}
)
"""What a row holds for those who carry it, beside whatever begins with `_ng_`; the rest is its environment's own."""

DEEPEST = 64
"""How far down nulls are looked for."""


@dataclass(frozen=True, slots=True)
class Given:
    """A *row* as its environment is given it, what was *said* of it by our own clients, and what follows from both."""

    row: Row
    seed: int
    repeat: int = 0
    id: str = ""
    said: Item | None = None
    budget: Budget | None = None


def given(body: Row, environment: Playable, *, rollout: str | None = None) -> Given:
    """Give what *body* brings to *environment*; *rollout* is the id in its path. Raises `Refused`."""
    said = body.get("gymsdk")
    ours: Item = said if isinstance(said, dict) else {}
    declared = environment.task_type.model_fields if isinstance(environment, Environment) else {}
    named = {key: value for key, value in body.items() if key not in {ROLLOUT_ID, "capture_rollout_id"}}
    row = unplayed(named, keep=declared.keys() - {"gymsdk"})
    if "responses_create_params" in row:
        row["responses_create_params"] = without_nulls(row["responses_create_params"])
    repeat = _whole(ours.get("repeat"), body.get(ROLLOUT_INDEX)) or 0
    seed = _whole(ours.get("seed"))
    whose = _id(body.get(ROLLOUT_ID, body.get("capture_rollout_id"))) or rollout or ""
    trail.name(whose)
    return Given(
        row=row,
        seed=seed_for(row, environment.name, repeat=repeat) if seed is None else seed,
        repeat=repeat,
        id=whose,
        said=ours if isinstance(said, dict) else None,
        budget=_budget(ours.get("budget")),
    )


def seed_for(row: Row, environment: str, *, repeat: int = 0) -> int:
    """Give the seed of an episode of *row*: its task's, or one that its own fields alone decide."""
    index = _whole(row.get(TASK_INDEX))
    if index is not None:
        return seed_of(0, Job(environment, index, repeat, row))
    digest = hashlib.sha256(environment.encode() + b":" + ordered(own(row))).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def own(row: Mapping[str, Any]) -> Row:
    """Give the fields of *row* that are its environment's own; a null is a field left out."""
    return {
        key: value
        for key, value in row.items()
        if value is not None and key not in ROUTING and not key.startswith("_ng_")
    }


def response_of(body: Row) -> Item:
    """Give the response *body* holds, without its nulls; raises `Refused` where there is none that can be read."""
    response = body.get("response")
    found: Item = {**response, "output": without_nulls(response.get("output"))} if isinstance(response, dict) else {}
    if not is_response(found) or not all(map(_is_whole, found["output"])):
        raise Refused(422, "`response` must be a Response object whose `output` is a list of items")
    return found


def _is_whole(item: Item) -> bool:
    """Whether an item has what makes it one: half of it would be graded as if the policy had said nothing."""
    if item.get("type") == "function_call":
        return isinstance(item.get("name"), str) and isinstance(item.get("call_id", ""), str)
    if item.get("type", "message") == "message":
        return "content" in item
    return isinstance(item.get("call_id", ""), str)


def ended(body: Row, response: Item) -> Ended:
    """Give how the episode ended that *response* tells of, as far as it can be known."""
    ours = body.get("gymsdk")
    told = ours.get("ended") if isinstance(ours, dict) else None
    for word in get_args(Ended):
        if told == word:
            return word  # type: ignore[no-any-return]  # one of its words
    return "tokens" if is_incomplete(response) else "done"


def without_nulls(value: Any, depth: int = 0) -> Any:
    """Give *value* without the fields that are null: tables fill in those that a row does not have."""
    if depth > DEEPEST:
        return value
    if isinstance(value, dict):
        return {key: without_nulls(each, depth + 1) for key, each in value.items() if each is not None}
    if isinstance(value, list) and not (value and isinstance(value[0], (int, float, str))):
        return [without_nulls(each, depth + 1) for each in value]
    return value


def prompt_of(row: Row) -> list[Any] | None:
    """Give what *row* has the model answer, in one form however it is written; `None` where it does not say."""
    params = row.get("responses_create_params")
    items = params.get("input") if isinstance(params, dict) else None
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    return [_plain(without_nulls(item)) for item in items] if isinstance(items, list) else None


def _plain(item: Any) -> Any:
    if not isinstance(item, dict) or item.get("type", "message") != "message":
        return item
    kept = {key: value for key, value in item.items() if key not in {"type", "status", "id", "content"}}
    content = item.get("content")
    parts = isinstance(content, list) and all(isinstance(part, dict) for part in content)
    return kept | {"content": (text_of(content) if parts else "") or content}


def within(asked: Budget | None, allowed: Budget) -> Budget:
    """Give the budget that was *asked* for, as far as it is *allowed*."""
    if asked is None:
        return allowed
    return Budget(
        turns=min(asked.turns, allowed.turns),
        tools=min(asked.tools, allowed.tools),
        seconds=min(asked.seconds, allowed.seconds),
        output=min(asked.output, allowed.output),
    )


async def tolerant(row: Row, play: Callable[[Row], Awaitable[T]]) -> T:
    """Give what *play* makes of *row*: as it is, or where that does not fit, without its nulls; raises `BadRow`."""
    try:
        return await play(row)
    except BadRow:
        bare = without_nulls(row)
        if bare == row:
            raise
        return await play(bare)


def _whole(*values: object) -> int | None:
    return next((value for value in values if isinstance(value, int) and not isinstance(value, bool)), None)


def _id(value: object) -> str | None:
    if value is None:
        return None
    if isinstance(value, str) and re.fullmatch(ID, value):
        return value
    raise Refused(422, f"`{ROLLOUT_ID}` must be letters, digits, dots, dashes and underscores, not {str(value)[:80]!r}")


def _budget(value: object) -> Budget | None:
    try:
        return None if value is None else Budget.model_validate(value)
    except ValidationError as error:
        raise Refused(422, f"the budget of the row does not fit: {complaints.sentence(error)}") from None
