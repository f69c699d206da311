"""Parses requests that bring a row: the row, its identity, seed, budget and rollout id, and the response to judge.

Tables (pandas, Arrow, `datasets`) add a null for each field that a row lacks, and clients add or drop nulls on the way.
The canonical form of a row therefore has no null members. It decides the seed, the session of the row, and whether a
request is a repeat. Every part of the server that compares or hashes rows uses the functions of this module.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Annotated, Any, TypeVar, cast

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gymsdk import errors, tracing
from gymsdk.edge.app import ID_PATTERN
from gymsdk.edge.errors import RequestRejected
from gymsdk.environment import Environment
from gymsdk.errors import BadRow
from gymsdk.jsonl import dump_canonical_json
from gymsdk.line import HOST, ROLLOUT_INDEX, TASK_INDEX, compute_seed, strip_results
from gymsdk.request_options import RequestOptions
from gymsdk.responses import TOKEN_FIELDS, is_incomplete_response
from gymsdk.types import (
    Budget,
    EndReason,
    Item,
    Playable,
    Row,
    Task,
    extract_text,
    find_invalid_field,
    find_invalid_param,
)

BodyModel = TypeVar("BodyModel", bound=BaseModel)


ROUTING_FIELDS = frozenset(
    {"responses_create_params", "response", HOST, "agent_ref", "task_source", "skills_ref", "capture_rollout_id"}
)
"""Fields of the host, beside those that begin with `_ng_`; all other fields belong to the environment."""

SCALAR_TYPES = frozenset({str, int, float, bool, type(None)})

ROLLOUT_ID_FIELD = "_ng_rollout_id"
"""Field with the id of the rollout that a row is played for; `capture_rollout_id` is an alias."""

REQUEST_ID_FIELD = "_ng_step_request_id"
"""Field with which a client names a step, so that a repeated request is not played twice."""

NUMBERED_ROLLOUT_PATTERN = re.compile(r"\d+-(?P<repeat>\d+)(-a\d+)?")
"""How NeMo Gym's clients name rollouts by default: task and repeat, the same in each run."""


class EpisodeId(BaseModel):
    """The rollout and the attempt in NeMo Gym's typed bodies."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rollout_id: str = Field(pattern=f"^{ID_PATTERN}$")
    attempt: int = Field(default=0, ge=0)

    @property
    def key(self) -> str:
        """The rollout id, with the attempt as a suffix from the second attempt on."""
        return f"{self.rollout_id}-a{self.attempt}" if self.attempt else self.rollout_id

    def includes(self, rollout: str) -> bool:
        """Return whether a rollout id of a path or a row names this episode, with or without its attempt."""
        return rollout in (self.rollout_id, self.key)


class TaskId(BaseModel):
    """The task set and the task in NeMo Gym's typed bodies."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    taskset: str = Field(min_length=1)
    task_id: Annotated[str, Field(min_length=1)] | int


class SeedRequest(BaseModel):
    """The typed body of `/seed_session`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    resources_session_id: str
    episode_id: EpisodeId
    task_id: TaskId
    task_data: dict[str, Any]


class CloseRequest(BaseModel):
    """The typed body of `/close_session`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    resources_session_id: str
    episode_id: EpisodeId | None = None


def parse_body(kind: type[BodyModel], body: Row, *, where: str = "body") -> BodyModel:
    """Validate the body or another part of a request as a pydantic model.

    Args:
        kind: The model.
        body: The values.
        where: The part of the request, for the error message.

    Raises:
        RequestRejected: The values do not match the model.
    """
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False)
        shape = [{**problem, "loc": [where, *problem["loc"]]} for problem in problems]
        raise RequestRejected(422, f"the {where} is invalid", shape=shape) from None


def to_canonical(value: Any) -> Any:
    """Return a JSON value without null members of objects, at every depth.

    Null elements of arrays stay, because their position matters. The walk is not recursive, so depth is not limited.
    Token ids and log-probabilities are numbers, and are not looked at.
    """
    # In a list, so that the outermost value is copied like a member.
    holder = [value]
    pending: list[Any] = [holder]
    while pending:
        container = pending.pop()
        for key, member in container.items() if isinstance(container, dict) else enumerate(container):
            # Most members are scalars: one look at the type costs half as much as the questions below.
            if type(member) in SCALAR_TYPES:
                continue
            if isinstance(member, dict):
                copy: Any = {name: child for name, child in member.items() if child is not None}
            elif (
                isinstance(member, list) and key not in TOKEN_FIELDS and not SCALAR_TYPES.issuperset(map(type, member))
            ):
                copy = list(member)
            else:
                continue
            container[key] = copy
            pending.append(copy)
    return holder[0]


def _copy_without_nulls(row: Mapping[str, Any]) -> Row:
    """Return a deep copy of *row* in the form of `to_canonical`; most rows have no nulls, and are copied quickly."""
    try:
        text = orjson.dumps(row)
    except TypeError:  # an integer beyond 64 bits, or an unpaired surrogate
        return cast(Row, to_canonical(row))
    # The word may also stand in a text, which only makes the copy slower.
    return cast(Row, to_canonical(row) if b"null" in text else orjson.loads(text))


def digest_row(row: Row) -> str:
    """Return a digest that is equal for rows, or whole request bodies, with the same canonical form."""
    return hashlib.sha256(dump_canonical_json(to_canonical(row))).hexdigest()


@dataclass(frozen=True)
class RowIdentity:
    """A row for comparison with other rows. The canonical form is computed on first use.

    Attributes:
        row: The row as the client sent it.
    """

    row: Row = field(repr=False)

    def compute(self) -> None:
        """Compute the canonical form now: an environment may change the objects in the row while it plays."""
        _ = self.fields, self.prompt

    @cached_property
    def fields(self) -> Row:
        """The environment's own fields in canonical form."""
        own_keys = [key for key in self.row if key not in ROUTING_FIELDS and not key.startswith("_ng_")]
        return _copy_without_nulls({key: self.row[key] for key in own_keys})

    @cached_property
    def prompt(self) -> list[Any] | None:
        """The input items in one normal form, or `None` if the row has no prompt."""
        return _normalize_prompt(self.row)

    def without_row(self) -> RowIdentity:
        """Return the same identity with no more of the row than its task index; `compute` must have been called."""
        small = RowIdentity({key: self.row[key] for key in (TASK_INDEX,) if key in self.row})
        vars(small).update(fields=self.fields, prompt=self.prompt)
        return small

    @property
    def task_index(self) -> int | None:
        """The index of the task, if the row has one."""
        index = self.row.get(TASK_INDEX)
        return index if isinstance(index, int) and not isinstance(index, bool) else None

    def seed(self, environment: str) -> int:
        """Return the seed of an episode, derived from the task index if the row has one, else from the fields."""
        if self.task_index is not None:
            return compute_seed(0, environment, self.task_index)
        return self.seed_of_fields(environment)

    def seed_of_fields(self, environment: str) -> int:
        """Return the seed derived from the row's own fields, ignoring the task index."""
        digest = hashlib.sha256(environment.encode() + b":" + dump_canonical_json(self.fields)).digest()
        # 31 bits: many generators take a seed as a signed 32-bit integer.
        return int.from_bytes(digest[:4], "big") >> 1


@dataclass(slots=True)
class SessionOrigin:
    """The row with which a session was opened.

    Attributes:
        identity: The row in canonical form.
        task: The task of the row. Once the session is judged, only its fields that the row does not have.
        seed: The episode's seed.
        typed: Whether the client opened the session with the typed body.
        prompted: Whether the row had a prompt; the typed body may leave the prompt to the agent.
        seed_given: Whether the client chose the seed; otherwise the row determined it.
    """

    identity: RowIdentity
    task: Task | SimpleNamespace
    seed: int
    typed: bool = False
    prompted: bool = True
    seed_given: bool = False

    def keep_row_only(self, task: Task) -> None:
        """Drop what only the play of the row needs."""
        self.identity = self.identity.without_row()
        # `/verify` compares these with the row that it gets.
        missing = type(task).model_fields.keys() - self.identity.fields.keys() - {"responses_create_params"}
        self.task = SimpleNamespace(**{name: getattr(task, name) for name in missing})


def _normalize_prompt(row: Row) -> list[Any] | None:
    """Return the prompt's items in one form, however the row writes them."""
    params = row.get("responses_create_params")
    items = params.get("input") if isinstance(params, dict) else None
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    return [_normalize_message(to_canonical(item)) for item in items] if isinstance(items, list) else None


def _normalize_message(item: Any) -> Any:
    if not isinstance(item, dict) or item.get("type", "message") != "message":
        return item
    # Clients add ids and statuses, and write a text as a string or as parts.
    kept = {key: value for key, value in item.items() if key not in {"type", "status", "id", "content"}}
    content = item.get("content")
    parts = isinstance(content, list) and all(isinstance(part, dict) for part in content)
    return kept | {"content": (extract_text(content) if parts else "") or content}


@dataclass(frozen=True, slots=True)
class RowRequest:
    """A request to play or judge a row.

    Attributes:
        row: The row as the environment gets it.
        identity: The row in canonical form.
        seed: The episode's seed.
        repeat: Which repeat of the task this is, from 0.
        id: The rollout's id, or an empty string.
        options: What a client of gymsdk says about the episode, `None` for other clients.
        budget: The budget that the client asks for.
    """

    row: Row
    identity: RowIdentity
    seed: int
    repeat: int = 0
    id: str = ""
    options: RequestOptions | None = None
    budget: Budget | None = None

    @property
    def seed_given(self) -> bool:
        """Whether the client chose the seed; otherwise the row determines it."""
        return self.options is not None and self.options.seed is not None

    def echo(self, content: Row) -> Item:
        """Return the row, the prompt and the response as the client sent them in *content*."""
        prompt = {key: content[key] for key in ("responses_create_params",) if key in content}
        return {**self.row, **prompt, "response": content["response"]}


def parse_row_request(body: Row, environment: Playable, *, rollout: str | None = None) -> RowRequest:
    """Parse the body of a request that brings a row.

    Args:
        body: The body.
        environment: The environment that the row is for.
        rollout: The rollout id in the request's path.

    Raises:
        RequestRejected: The rollout id or the budget is invalid.
        BadRow: A field of the prompt is invalid.
    """
    options = RequestOptions.parse(body)
    own = options or RequestOptions()
    budget = _read_budget(own.budget)
    rollout_id = _read_id(body.get(ROLLOUT_ID_FIELD, body.get("capture_rollout_id"))) or rollout or ""
    repeat = _first_integer(own.repeat, body.get(ROLLOUT_INDEX), _parse_repeat(rollout_id)) or 0
    # Before the check of the row, so that the log names the rollout of a rejected row.
    tracing.set_rollout_id(rollout_id)
    declared = environment.task_type.model_fields if isinstance(environment, Environment) else {}
    fields = {key: value for key, value in body.items() if key not in {ROLLOUT_ID_FIELD, "capture_rollout_id"}}
    # An environment may declare a field that is named like a result, but `gymsdk` is always the host's.
    row = strip_results(fields, keep=declared.keys() - {HOST})
    if "responses_create_params" in row:
        row |= _copy_without_nulls({"responses_create_params": row["responses_create_params"]})
        _check_params(row["responses_create_params"])
    identity = RowIdentity(row)
    return RowRequest(
        row=row,
        identity=identity,
        seed=identity.seed(environment.name) if own.seed is None else own.seed,
        repeat=repeat,
        id=rollout_id,
        options=options,
        budget=budget,
    )


def _check_params(params: object) -> None:
    """Check the prompt of a row before it is compared with the prompts of sessions."""
    if isinstance(params, dict) and (invalid := find_invalid_param(params)):
        raise BadRow("`responses_create_params.{}` must be {}".format(*invalid))


def parse_response(body: Row) -> Item:
    """Return the Response object in `body`, without nulls.

    Raises:
        RequestRejected: `body` has no valid Response object.
    """
    response = body.get("response")
    parsed: Item = {**response, "output": to_canonical(response.get("output"))} if isinstance(response, dict) else {}
    output = parsed.get("output")
    if not isinstance(output, list):
        raise RequestRejected(422, "`response` must be a Response object whose `output` is a list of items")
    if invalid := find_invalid_field(output, "response.output") or _find_missing_content(output):
        message = "`response` must be a Response object; `{}` must be {}".format(*invalid)
        raise RequestRejected(422, message)
    return parsed


def _find_missing_content(output: Sequence[Item]) -> tuple[str, str] | None:
    """Return the path of the first message without content: such a message would be graded as silence of the policy."""
    numbers = (number for number, item in enumerate(output) if item.get("type", "message") == "message")
    missing = next((number for number in numbers if "content" not in output[number]), None)
    return None if missing is None else (f"response.output.{missing}.content", "text or a list of parts")


def strip_server_prefix(items: Sequence[Item], server: str) -> list[Item]:
    """Return items without the `mcp__SERVER__` prefix that MCP clients put before tool names."""
    prefix = f"mcp__{server}__"
    return [
        {**item, "name": name.removeprefix(prefix)}
        if item.get("type") == "function_call" and isinstance(name := item.get("name"), str)
        else item
        for item in items
    ]


def infer_end_reason(options: RequestOptions | None, response: Item) -> EndReason:
    """Return how the episode of a response ended, as far as the request shows it."""
    if options is not None and options.ended is not None:
        return options.ended
    return "tokens" if is_incomplete_response(response) else "done"


def limit_budget(requested: Budget | None, allowed: Budget) -> Budget:
    """Return the requested budget, limited to what is allowed."""
    if requested is None:
        return allowed
    return Budget(
        turns=min(requested.turns, allowed.turns),
        tools=min(requested.tools, allowed.tools),
        seconds=min(requested.seconds, allowed.seconds),
        output=min(requested.output, allowed.output),
    )


def remove_nulls(row: Row, error: BadRow) -> Row:
    """Return a row that does not fit its environment without its nulls; raise *error* if the row has none."""
    stripped: Row = to_canonical(row)
    if stripped == row:
        raise error
    return stripped


def _first_integer(*values: object) -> int | None:
    return next((value for value in values if isinstance(value, int) and not isinstance(value, bool)), None)


def _parse_repeat(rollout: str) -> int | None:
    """Return the repeat number in a rollout id: a row in a NeMo Gym episode request has no index."""
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
        raise RequestRejected(422, f"the row's budget is invalid: {errors.format_validation_error(error)}") from None


def parse_task(row: Row, environment: Environment) -> Task:
    """Parse `row` as a task of the environment, without its nulls if it does not fit as it is.

    Raises:
        BadRow: The row does not fit the environment.
    """
    try:
        return environment.read(row)
    except BadRow as error:
        return environment.read(remove_nulls(row, error))
