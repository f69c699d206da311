"""Reading requests that bring a row: the row, its seed, its budget, its rollout id, its response."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gymsdk import context, errors
from gymsdk.environment import Environment
from gymsdk.episode import Budget
from gymsdk.errors import BadRow
from gymsdk.jsonl import dump_canonical_json
from gymsdk.metrics import ROLLOUT_INDEX, TASK_INDEX
from gymsdk.responses import is_incomplete_response, is_response
from gymsdk.rollouts.folder import unplayed
from gymsdk.rollouts.jobs import Job, seed_of
from gymsdk.servers.app import RequestRejected
from gymsdk.servers.routing import ID_PATTERN
from gymsdk.types import EndReason, Item, Playable, Row, Task, extract_text

BodyModel = TypeVar("BodyModel", bound=BaseModel)


class EpisodeId(BaseModel):
    """Which rollout, and which attempt at it, in NeMo Gym's typed bodies."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rollout_id: str = Field(pattern=f"^{ID_PATTERN}$")
    attempt: int = Field(default=0, ge=0)

    @property
    def key(self) -> str:
        """Its name where there is room for one word."""
        return f"{self.rollout_id}-a{self.attempt}" if self.attempt else self.rollout_id


class TaskId(BaseModel):
    """Which task of which set, in NeMo Gym's typed bodies."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    taskset: str = Field(min_length=1)
    task_id: Annotated[str, Field(min_length=1)] | int


class SeedRequest(BaseModel):
    """The typed body that opens a session."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    resources_session_id: str
    episode_id: EpisodeId
    task_id: TaskId
    task_data: dict[str, Any]


class CloseRequest(BaseModel):
    """The typed body that closes a session."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    resources_session_id: str
    episode_id: EpisodeId | None = None


def parse_body(kind: type[BodyModel], body: Row) -> BodyModel:
    """Give *body* as what its *kind* of request holds; raises `Refused` where it does not fit."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False)
        shape = [{**each, "loc": ["body", *each["loc"]]} for each in found]
        raise RequestRejected(422, "the body does not fit", shape=shape) from None


ROUTING_FIELDS = frozenset(
    {"responses_create_params", "response", "gymsdk", "agent_ref", "task_source", "skills_ref", "capture_rollout_id"}
)
"""Fields that route a row or tell of its play, beside those that begin with `_ng_`; the rest is the environment's."""

SCALAR_TYPES = frozenset({str, int, float, bool, type(None)})


def to_canonical(value: Any) -> Any:
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
            elif isinstance(each, list) and not SCALAR_TYPES.issuperset(map(type, each)):
                copied = list(each)
            else:
                continue
            container[key] = copied
            pending.append(copied)
    return holder[0]


def digest_row(row: Row) -> str:
    """Return a digest that is the same for rows, or whole requests, with the same canonical form."""
    return hashlib.sha256(dump_canonical_json(to_canonical(row))).hexdigest()


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
        found = hashlib.sha256(environment.encode() + b":" + dump_canonical_json(self.fields)).digest()
        return int.from_bytes(found[:4], "big") >> 1


def _own_fields(row: Mapping[str, Any]) -> Row:
    fields: Row = to_canonical(
        {key: value for key, value in row.items() if key not in ROUTING_FIELDS and not key.startswith("_ng_")}
    )
    return fields


def _prompt(row: Row) -> list[Any] | None:
    """Return the items that the model is to answer, in one form however the row writes them."""
    params = row.get("responses_create_params")
    items = params.get("input") if isinstance(params, dict) else None
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    return [_plain_message(to_canonical(item)) for item in items] if isinstance(items, list) else None


def _plain_message(item: Any) -> Any:
    if not isinstance(item, dict) or item.get("type", "message") != "message":
        return item
    kept = {key: value for key, value in item.items() if key not in {"type", "status", "id", "content"}}
    content = item.get("content")
    parts = isinstance(content, list) and all(isinstance(part, dict) for part in content)
    return kept | {"content": (extract_text(content) if parts else "") or content}


T = TypeVar("T")

ROLLOUT_ID_FIELD = "_ng_rollout_id"
"""How a client names the rollout that a row is played for; an alias is `capture_rollout_id`."""


NUMBERED_ROLLOUT_PATTERN = re.compile(r"\d+-(?P<repeat>\d+)(-a\d+)?")
"""How clients of NeMo Gym name a rollout that nobody else has named: by its task and repeat, as the next run does."""


@dataclass(frozen=True, slots=True)
class RowRequest:
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
        return self.said is not None and _first_integer(self.said.get("seed")) is not None


def parse_row_request(body: Row, environment: Playable, *, rollout: str | None = None) -> RowRequest:
    """Give what *body* brings to *environment*; *rollout* is the id in its path. Raises `Refused`."""
    said = body.get("gymsdk")
    ours: Item = said if isinstance(said, dict) else {}
    declared = environment.task_type.model_fields if isinstance(environment, Environment) else {}
    named = {key: value for key, value in body.items() if key not in {ROLLOUT_ID_FIELD, "capture_rollout_id"}}
    row = unplayed(named, keep=declared.keys() - {"gymsdk"})
    if "responses_create_params" in row:
        row["responses_create_params"] = to_canonical(row["responses_create_params"])
    seed = _first_integer(ours.get("seed"))
    whose = _read_id(body.get(ROLLOUT_ID_FIELD, body.get("capture_rollout_id"))) or rollout or ""
    context.set_rollout_id(whose)
    repeat = _first_integer(ours.get("repeat"), body.get(ROLLOUT_INDEX), _parse_repeat(whose)) or 0
    identity = RowIdentity.of_row(row)
    return RowRequest(
        row=row,
        identity=identity,
        seed=identity.seed(environment.name, repeat=repeat) if seed is None else seed,
        repeat=repeat,
        id=whose,
        said=ours if isinstance(said, dict) else None,
        budget=_read_budget(ours.get("budget")),
    )


def parse_response(body: Row) -> Item:
    """Give the response *body* holds, without its nulls; raises `Refused` where there is none that can be read."""
    response = body.get("response")
    found: Item = {**response, "output": to_canonical(response.get("output"))} if isinstance(response, dict) else {}
    if not is_response(found) or not all(map(_is_complete_item, found["output"])):
        raise RequestRejected(422, "`response` must be a Response object whose `output` is a list of items")
    return found


def _is_complete_item(item: Item) -> bool:
    """Whether an item has what makes it one: half of it would be graded as if the policy had said nothing."""
    if item.get("type") == "function_call":
        return isinstance(item.get("name"), str) and isinstance(item.get("call_id", ""), str)
    if item.get("type", "message") == "message":
        return "content" in item
    return isinstance(item.get("call_id", ""), str)


def infer_end_reason(body: Row, response: Item) -> EndReason:
    """Give how the episode ended that *response* tells of, as far as it can be known."""
    ours = body.get("gymsdk")
    told = ours.get("ended") if isinstance(ours, dict) else None
    for word in get_args(EndReason):
        if told == word:
            return word  # type: ignore[no-any-return]  # one of its words
    return "tokens" if is_incomplete_response(response) else "done"


def limit_budget(asked: Budget | None, allowed: Budget) -> Budget:
    """Give the budget that was *asked* for, as far as it is *allowed*."""
    if asked is None:
        return allowed
    return Budget(
        turns=min(asked.turns, allowed.turns),
        tools=min(asked.tools, allowed.tools),
        seconds=min(asked.seconds, allowed.seconds),
        output=min(asked.output, allowed.output),
    )


async def play_without_nulls(row: Row, play: Callable[[Row], Awaitable[T]]) -> T:
    """Return what *play* returns for *row*: first as it is, then, if it does not fit, without its nulls."""
    try:
        return await play(row)
    except BadRow:
        bare = to_canonical(row)
        if bare == row:
            raise
        return await play(bare)


def _first_integer(*values: object) -> int | None:
    return next((value for value in values if isinstance(value, int) and not isinstance(value, bool)), None)


def _parse_repeat(rollout: str) -> int | None:
    """Return the repeat that a rollout's id tells of: a row in a NeMo Gym episode request has no index of its own."""
    numbered = NUMBERED_ROLLOUT_PATTERN.fullmatch(rollout)
    return int(numbered["repeat"]) if numbered else None


def _read_id(value: object) -> str | None:
    if value is None:
        return None
    if isinstance(value, str) and re.fullmatch(ID_PATTERN, value):
        return value
    raise RequestRejected(
        422, f"`{ROLLOUT_ID_FIELD}` must be letters, digits, dots, dashes and underscores, not {str(value)[:80]!r}"
    )


def _read_budget(value: object) -> Budget | None:
    try:
        return None if value is None else Budget.model_validate(value)
    except ValidationError as error:
        raise RequestRejected(
            422, f"the budget of the row does not fit: {errors.format_validation_error(error)}"
        ) from None


def parse_task(row: Row, environment: Environment) -> Task:
    """Return the task that *row* is: read as it is, or, if that does not fit, without its nulls; raises `BadRow`."""
    try:
        return environment.read(row)
    except BadRow:
        bare = to_canonical(row)
        if bare == row:
            raise
        return environment.read(bare)
