"""What flows: a task becomes an episode, its turns a transcript, the transcript a verdict."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol, Self, TypeAlias, TypeGuard, runtime_checkable

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    SerializeAsAny,
    ValidationError,
    model_validator,
)

from gymsdk.errors import format_suggestion

Item: TypeAlias = dict[str, Any]
"""One Responses item, part or body: a JSON object."""


Content: TypeAlias = str | list[Item]
"""Text, or a list of content parts (images are parts)."""


EndReason: TypeAlias = Literal["done", "turns", "tools", "tokens", "deadline"]
"""Why an episode ended: by itself, or because a budget ran out."""


class Message(BaseModel):
    """A chat message: as an action it is the policy's plain reply, in a reset or step what it sees next."""

    model_config = ConfigDict(frozen=True)

    role: Literal["user", "assistant", "system", "developer"] = "assistant"
    content: Content

    @property
    def text(self) -> str:
        """The message's text, its parts joined."""
        return extract_text(self.content)

    def item(self) -> Item:
        """Give the message as an input item."""
        return {"type": "message", "role": self.role, "content": self.content}


def _arguments_to_json(arguments: object) -> object:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, Mapping) else arguments


class ToolCall(BaseModel):
    """A policy's call of one tool, its arguments verbatim as JSON text (a mapping is written as JSON)."""

    model_config = ConfigDict(frozen=True)

    name: str
    arguments: Annotated[str, BeforeValidator(_arguments_to_json)] = "{}"
    call_id: str = ""

    def parsed(self) -> dict[str, Any] | None:
        """Give the arguments as a dict, or `None` where they are not a JSON object."""
        try:
            value = json.loads(self.arguments)
        except (ValueError, RecursionError):
            return None
        return value if isinstance(value, dict) else None


Action: TypeAlias = Message | ToolCall
"""What a policy does: a plain reply, or one tool call."""


def extract_text(content: Content | None) -> str:
    """Give the text in *content*: a string itself, or the text of its parts joined."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(text for part in content if isinstance(text := part.get("text"), str))


def is_object_list(value: object) -> TypeGuard[list[Item]]:
    """Whether *value* is a list of JSON objects."""
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)


def is_content(value: object) -> TypeGuard[Content | None]:
    """Return whether *value* can be the content of a message: text, a list of parts, or nothing."""
    return value is None or isinstance(value, str) or is_object_list(value)


def is_reply(item: Item) -> bool:
    """Whether *item* is a message of the policy."""
    return item.get("role") == "assistant" and item.get("type", "message") == "message"


@dataclass(slots=True)
class Transcript:
    """What was said: the *opening* the policy was shown, then its own *items* and the environment's answers."""

    opening: list[Item] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)
    ended: EndReason | None = None

    @property
    def reply(self) -> str:
        """The text of the policy's last turn where that turn called no tool, else an empty string."""
        parts: list[str] = []
        for item in reversed(self.items):
            kind = item.get("type", "message")
            if kind == "function_call":
                return ""
            if is_reply(item):
                parts.append(extract_text(item.get("content")))
            elif kind != "reasoning" and (parts or kind != "message"):
                break
        return "".join(reversed(parts))

    def text(self) -> str:
        """Give every text the policy wrote, reasoning excluded, joined without a separator."""
        return "".join(extract_text(item.get("content")) for item in self.items if is_reply(item))

    def calls(self, name: str | None = None) -> list[ToolCall]:
        """Give the tool calls in order, all or those of one *name*."""
        return [call for call in iter_tool_calls(self.items) if name is None or call.name == name]

    def output(self, call_id: str) -> str | None:
        """Give the text that answered the call with this id, or `None` where none did."""
        for item in self.items:
            if item.get("type") == "function_call_output" and item.get("call_id") == call_id:
                return extract_text(item.get("output"))
        return None


def iter_tool_calls(items: Iterable[Item]) -> Iterator[ToolCall]:
    """Yield the function calls among *items*."""
    for item in items:
        if item.get("type") == "function_call":
            arguments = item.get("arguments")
            yield ToolCall(
                name=str(item.get("name", "")),
                arguments=arguments if isinstance(arguments, str) else json.dumps(arguments),
                call_id=str(item.get("call_id", "")),
            )


Row: TypeAlias = dict[str, Any]
"""One line of a task file: `responses_create_params` and the environment's own fields."""


AGENT_SUFFIX = "_simple_agent"
"""Suffix that makes the name of an environment's agent (`agent_ref` of a row)."""


def build_agent_reference(agent: str) -> Row:
    """Return how a row names the *agent* it is for, in NeMo Gym's form."""
    return {"type": "responses_api_agents", "name": agent}


def _check_prompt(params: Item) -> Item:
    if not isinstance(params.get("input"), str) and not is_object_list(params.get("input")):
        raise ValueError("`input` must be a string or a list of message objects")
    if params.get("tools") is not None and not is_object_list(params["tools"]):
        raise ValueError("`tools` must be a list of tool objects")
    return params


class Task(BaseModel):
    """One row of an environment: subclass it to declare the row's own fields; undeclared ones are kept."""

    model_config = ConfigDict(frozen=True, extra="allow")

    responses_create_params: Annotated[Item, AfterValidator(_check_prompt)]

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Refuse a field that hides what every task has."""
        if hidden := sorted(cls.model_fields.keys() & {"ask", "input", "row"}):
            raise TypeError(f"a task's field may not be called {hidden[0]!r}: every task has that; choose another name")

    @classmethod
    def ask(cls, prompt: str, **fields: Any) -> Self:
        """Give the task that opens with *prompt* as the user's message."""
        params = {"input": [{"role": "user", "content": prompt}]}
        return cls.model_validate({"responses_create_params": params, **fields})

    @property
    def input(self) -> list[Item]:
        """The row's own prompt, as items."""
        given: Content = self.responses_create_params["input"]
        return [{"role": "user", "content": given}] if isinstance(given, str) else given

    def row(self) -> Row:
        """Return the task as a JSON object; `Environment.row` adds the agent and the tools, for clients elsewhere."""
        return self.model_dump(mode="json")


class Config(BaseModel):
    """An environment's settings: subclass it; every field needs a default unless the user must choose."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


class State(BaseModel):
    """What an episode remembers: the one mutable model, changed in place by `step` and tools."""

    model_config = ConfigDict(extra="forbid")


def _default_to_user(message: object) -> object:
    if isinstance(message, str):
        return Message(role="user", content=message)
    if isinstance(message, Message) and "role" not in message.model_fields_set:
        return message.model_copy(update={"role": "user"})
    return message


EnvironmentMessage = Annotated[Message, BeforeValidator(_default_to_user)]
"""What an environment says: a message, or just its text; the user's unless its role is given."""


class Reset(BaseModel):
    """How an episode opens: messages after the row's own prompt, the state, the names of the tools on offer."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    messages: list[EnvironmentMessage] = []
    state: SerializeAsAny[State] = Field(default_factory=State)
    tools: list[str] | None = None


def _reject_assistant_messages(messages: list[Message]) -> list[Message]:
    if any(message.role == "assistant" for message in messages):
        raise ValueError("the assistant is the policy itself; what it sees next has another role")
    return messages


class Step(BaseModel):
    """The answer to one action: a tool's *output* or new *messages*, what it pays, whether the episode is over."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    messages: Annotated[list[EnvironmentMessage], AfterValidator(_reject_assistant_messages)] = []
    output: Content | None = None
    reward: float = 0.0
    done: bool = False


ROLLOUT_FIELDS = frozenset({"responses_create_params", "response", "reward_components", "agent_ref", "gymsdk"})
"""What a rollout's line holds beside the row's fields and the verdict's."""

UNMASKED_FIELDS: Mapping[str, Any] = {"mask_sample": False, "failure_kind": None, "failure_reason": None}
"""What NeMo Gym 0.7 writes beside a reward that counts; a verdict's field of that name wins."""


class Verdict(BaseModel):
    """The judgement of a transcript: subclass it to add fields, which go flat onto the rollout's line.

    *components*, where given, sum to *reward*. *grader_timeout* says that the grader spent its own budget on
    this answer. A field that the class does not declare is an error, unless a subclass allows it (`extra="allow"`).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    reward: float
    components: dict[str, float] = {}
    grader_timeout: bool = False

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Refuse a field that would take the place of something else on the rollout's line."""
        if taken := sorted(cls.model_fields.keys() & ROLLOUT_FIELDS):
            raise TypeError(f"a verdict's field may not be called {taken[0]!r}: a rollout's line has its own")

    @model_validator(mode="wrap")
    @classmethod
    def _explain_unknown_fields(cls, given: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(given)
        except ValidationError as error:
            unknown = [each["loc"][0] for each in error.errors() if each["type"] == "extra_forbidden"]
            if not unknown:
                raise
            name, known = str(unknown[0]), cls.model_fields
            near = format_suggestion(name, known, f"its fields: {', '.join(known)}")
            advice = "subclass Verdict and declare it there" if cls is Verdict else f"declare it in {cls.__name__}"
            raise ValueError(f"{cls.__name__} has no field {name!r}{near}. To add a field, {advice}") from None


class Claims(BaseModel):
    """What an environment may be held to on one task.

    *maximum* is the reward of a perfect policy, *chance* what a policy earns at most without understanding the
    task, *variants* other replies that are right.
    """

    model_config = ConfigDict(frozen=True)

    maximum: float = 1.0
    chance: float = 0.0
    variants: list[str] = []


@dataclass(slots=True)
class Episode:
    """One play of a task: data only; *environment* is whoever can reset, step, verify and close it.

    *seed* is the environment's, the same for every *repeat* of a task; *tools* are the schemas on offer;
    *deadline* is a time of the event loop's clock; *paid* is what the environment's steps in this process paid.
    """

    id: str
    seed: int
    task: Task
    row: Row
    environment: Playable
    state: State = field(default_factory=State)
    transcript: Transcript = field(default_factory=Transcript)
    tools: list[Item] = field(default_factory=list)
    repeat: int = 0
    deadline: float | None = None
    done: bool = False
    paid: float = 0.0


class Playable(Protocol):
    """Something an episode can be played against: an environment in this process, or one behind HTTP."""

    @property
    def name(self) -> str:
        """The environment's name."""

    async def reset(
        self, row: Row | Task, *, seed: int = 0, id: str = "", repeat: int = 0, deadline: float | None = None
    ) -> Episode:
        """Open an episode of *row*."""

    async def step(self, episode: Episode, action: Action) -> Step:
        """Answer one tool call or reply."""

    async def verify(self, episode: Episode) -> Verdict:
        """Judge the episode's transcript."""

    async def close(self, episode: Episode) -> None:
        """End the episode."""


@runtime_checkable
class Model(Protocol):
    """Something that answers a Responses API request; annotate a `Config` field with it to ask for one.

    *request* is the body of `POST /v1/responses`, the answer a Response object. It raises `Failed` where no
    answer can be had.
    """

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:
        """Answer *request*."""


class Usage(BaseModel):
    """Tokens of one or more model calls; a detail is `None` where a call did not report it."""

    model_config = ConfigDict(frozen=True)

    input_tokens: int = 0
    output_tokens: int = 0
    total_tokens: int = 0
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None
    calls: int = 0


UsageByRole = dict[str, Usage]
"""Usage by role: `policy`, and the names of the config fields that hold other models."""

_collected_usage: ContextVar[UsageByRole | None] = ContextVar("gymsdk_usage", default=None)


def parse_usage(response: Item) -> Usage:
    """Give the usage *response* reports, zero where it reports none."""
    usage = response.get("usage")
    given, taken = _read_count(usage, "input_tokens") or 0, _read_count(usage, "output_tokens") or 0
    return Usage(
        input_tokens=given,
        output_tokens=taken,
        total_tokens=_read_count(usage, "total_tokens") or given + taken,
        cached_tokens=_read_count(usage, "input_tokens_details", "cached_tokens"),
        reasoning_tokens=_read_count(usage, "output_tokens_details", "reasoning_tokens"),
        calls=1,
    )


def _read_count(value: object, *path: str) -> int | None:
    """Give the whole number at *path*; a server may report anything, and no episode fails for it."""
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, int) else None


def add_usage(one: Usage, other: Usage) -> Usage:
    """Give the sum; a detail that a call did not report is not known of the sum either."""
    if not one.calls or not other.calls:
        return other if not one.calls else one
    return Usage(
        input_tokens=one.input_tokens + other.input_tokens,
        output_tokens=one.output_tokens + other.output_tokens,
        total_tokens=one.total_tokens + other.total_tokens,
        cached_tokens=_add_optional(one.cached_tokens, other.cached_tokens),
        reasoning_tokens=_add_optional(one.reasoning_tokens, other.reasoning_tokens),
        calls=one.calls + other.calls,
    )


def merge_usage(one: UsageByRole, other: UsageByRole) -> UsageByRole:
    """Give the sum by role."""
    return one | {role: add_usage(one.get(role, Usage()), used) for role, used in other.items()}


def _add_optional(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other


def usage_to_item(usage: Usage) -> Item:
    """Give *usage* as a Response object carries it."""
    return {
        "input_tokens": usage.input_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }


@contextmanager
def collect_usage(ledger: UsageByRole) -> Iterator[None]:
    """Collect what is noted inside the block in *ledger*."""
    token = _collected_usage.set(ledger)
    try:
        yield
    finally:
        _collected_usage.reset(token)


def record_usage(role: str, response: Item) -> None:
    """Add *response*'s usage to *role* in the block around the call, if there is one."""
    ledger = _collected_usage.get()
    if ledger is not None:
        ledger[role] = add_usage(ledger.get(role, Usage()), parse_usage(response))


def fill_usage_details(response: Item) -> Item:
    """Give *response* with 0 where a detail of its usage is not known: OpenAI's types have no null there."""
    usage = response.get("usage")
    if not isinstance(usage, dict):
        return response
    details = {key: _replace_nulls(value) if key.endswith("_details") else value for key, value in usage.items()}
    return response | {"usage": details}


def _replace_nulls(details: object) -> object:
    if not isinstance(details, dict):
        return details
    return {key: 0 if value is None else value for key, value in details.items()}


Outcome: TypeAlias = Literal["scored", "unscorable", "failed"]
"""The three ways a rollout ends; only the first has a reward."""


class Failure(BaseModel):
    """Why a rollout has no reward: where it broke, a word for it, the sentence, whether and when a retry can help.

    *retry_after* is in seconds, `None` where nobody has said.
    """

    model_config = ConfigDict(frozen=True)

    stage: str
    kind: str
    message: str
    retryable: bool = False
    retry_after: float | None = None


class Timing(BaseModel):
    """Milliseconds of one rollout: per stage (a stage's calls summed), and per model call in order."""

    model_config = ConfigDict(frozen=True)

    total: float = 0.0
    stages: dict[str, float] = {}
    model_calls: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class ToolRun:
    """One tool call of an episode, and when it ran.

    Attributes:
        call_id: The id of the call.
        name: The tool's name.
        started: When the call began, in seconds since the epoch.
        milliseconds: How long the call took.
        answered: Whether the environment answered the call; a call after the end of an episode is not run.
    """

    call_id: str
    name: str
    started: float
    milliseconds: float = 0.0
    answered: bool = True


@dataclass(frozen=True, slots=True)
class ModelCall:
    """One model call of an episode, as far as the rollout's response does not tell.

    Attributes:
        started: When the call began, in seconds since the epoch.
        milliseconds: How long the call took.
        response: The response without its output.
        first: Where its items begin among the items of the transcript.
        count: How many items it has.
        tools: The tool calls that it made, in order.
    """

    started: float
    milliseconds: float
    response: Item
    first: int
    count: int
    tools: tuple[ToolRun, ...] = ()


class Rollout(BaseModel):
    """One finished play of one task.

    *reward* and *verdict* are there if and only if *outcome* is `scored`, *failure* if and only if it is not.
    *sampling* went over the row's own parameters, *opening* is what the policy was shown first.
    *response* is the last model answer with every item of the episode as its output and the usage summed.
    *rollout_id* is what the servers' logs call it, where servers played it under another name than *id*.
    *calls* are the model calls of an episode that was played in this process.
    """

    model_config = ConfigDict(frozen=True)

    id: str
    rollout_id: str = ""
    environment: str
    row: Row
    seed: int
    repeat: int = 0
    outcome: Outcome
    ended: EndReason | None = None
    sampling: Item = {}
    opening: list[Item] = []
    tools: list[Item] = []
    response: Item | None = None
    reward: float | None = None
    components: dict[str, float] = {}
    verdict: SerializeAsAny[Verdict] | None = None
    failure: Failure | None = None
    turns: int = 0
    usage: dict[str, Usage] = {}
    timing: Timing = Timing()
    calls: Sequence[ModelCall] = Field(default=(), exclude=True, repr=False)
