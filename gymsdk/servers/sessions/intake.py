"""Reading requests that bring a row: the row, its seed, its budget, its rollout id, its response."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar, get_args

from pydantic import ValidationError

from gymsdk import complaints, trail
from gymsdk.environment import Environment
from gymsdk.errors import BadRow
from gymsdk.metrics import ROLLOUT_INDEX
from gymsdk.responses import is_incomplete, is_response
from gymsdk.rollouts.lines import unplayed
from gymsdk.servers.app import Refused
from gymsdk.servers.door.routing import ID
from gymsdk.servers.sessions.identity import RowIdentity, canonical
from gymsdk.sitting import Budget
from gymsdk.transcript import Ended, Item
from gymsdk.types import Playable, Row, Task

T = TypeVar("T")

ROLLOUT_ID = "_ng_rollout_id"
"""How a client names the rollout that a row is played for; an alias is `capture_rollout_id`."""


NUMBERED_ROLLOUT = re.compile(r"\d+-(?P<repeat>\d+)(-a\d+)?")
"""How clients of NeMo Gym name a rollout that nobody else has named: by its task and repeat, as the next run does."""


@dataclass(frozen=True, slots=True)
class Given:
    """A request's *row* as its environment gets it, the row's *identity*, and what our own clients *said* of it."""

    row: Row
    identity: RowIdentity
    seed: int
    repeat: int = 0
    id: str = ""
    said: Item | None = None
    budget: Budget | None = None

    @property
    def seed_given(self) -> bool:
        """Whether the request names the seed, so that the row does not decide it."""
        return self.said is not None and _whole(self.said.get("seed")) is not None


def given(body: Row, environment: Playable, *, rollout: str | None = None) -> Given:
    """Give what *body* brings to *environment*; *rollout* is the id in its path. Raises `Refused`."""
    said = body.get("gymsdk")
    ours: Item = said if isinstance(said, dict) else {}
    declared = environment.task_type.model_fields if isinstance(environment, Environment) else {}
    named = {key: value for key, value in body.items() if key not in {ROLLOUT_ID, "capture_rollout_id"}}
    row = unplayed(named, keep=declared.keys() - {"gymsdk"})
    if "responses_create_params" in row:
        row["responses_create_params"] = canonical(row["responses_create_params"])
    seed = _whole(ours.get("seed"))
    whose = _id(body.get(ROLLOUT_ID, body.get("capture_rollout_id"))) or rollout or ""
    trail.name(whose)
    repeat = _whole(ours.get("repeat"), body.get(ROLLOUT_INDEX), _repeat_of(whose)) or 0
    identity = RowIdentity.of_row(row)
    return Given(
        row=row,
        identity=identity,
        seed=identity.seed(environment.name, repeat=repeat) if seed is None else seed,
        repeat=repeat,
        id=whose,
        said=ours if isinstance(said, dict) else None,
        budget=_budget(ours.get("budget")),
    )


def response_of(body: Row) -> Item:
    """Give the response *body* holds, without its nulls; raises `Refused` where there is none that can be read."""
    response = body.get("response")
    found: Item = {**response, "output": canonical(response.get("output"))} if isinstance(response, dict) else {}
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
    """Return what *play* returns for *row*: first as it is, then, if it does not fit, without its nulls."""
    try:
        return await play(row)
    except BadRow:
        bare = canonical(row)
        if bare == row:
            raise
        return await play(bare)


def _whole(*values: object) -> int | None:
    return next((value for value in values if isinstance(value, int) and not isinstance(value, bool)), None)


def _repeat_of(rollout: str) -> int | None:
    """Return the repeat that a rollout's id tells of: a row in a NeMo Gym episode request has no index of its own."""
    numbered = NUMBERED_ROLLOUT.fullmatch(rollout)
    return int(numbered["repeat"]) if numbered else None


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


def task_of(row: Row, environment: Environment) -> Task:
    """Return the task that *row* is: read as it is, or, if that does not fit, without its nulls; raises `BadRow`."""
    try:
        return environment.read(row)
    except BadRow:
        bare = canonical(row)
        if bare == row:
            raise
        return environment.read(bare)
