"""The data types of gymsdk: tasks, messages, transcripts, verdicts, episodes and rollouts.

A task becomes an episode, its turns a transcript, the transcript a verdict, and all of it a rollout. Items are objects
of the OpenAI Responses API, kept as plain JSON (https://platform.openai.com/docs/api-reference/responses).
"""

from __future__ import annotations

import json
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
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

from gymsdk.episode_record import EpisodeRecord
from gymsdk.errors import format_suggestion
from gymsdk.settings import LIMITS, Flag

Item: TypeAlias = dict[str, Any]
"""A Responses API item, content part or body: a JSON object."""

Content: TypeAlias = str | list[Item]
"""Text, or a list of content parts; images are parts."""

Row: TypeAlias = dict[str, Any]
"""One line of a task file: `responses_create_params` and the environment's own fields."""

EndReason: TypeAlias = Literal["done", "turns", "tools", "tokens", "deadline"]
"""Why an episode ended: the environment ended it (`done`), or the named budget ran out."""

Outcome: TypeAlias = Literal["scored", "unscorable", "failed"]
"""How a rollout ended; only a scored rollout has a reward."""

MAX_OUTPUT_CHARS = 4 * 2**20
"""The default maximum length of one tool output, in characters; images and files count."""

AGENT_SUFFIX = "_simple_agent"
"""The suffix that turns an environment's name into the name of its agent (`agent_ref` of a row)."""

ROLLOUT_FIELDS = frozenset({"responses_create_params", "response", "reward_components", "agent_ref", "gymsdk"})
"""Reserved fields of a rollout's line; the other fields are the row's and the verdict's."""

UNMASKED_FIELDS: Mapping[str, Any] = {"mask_sample": False, "failure_kind": None, "failure_reason": None}
"""The fields that NeMo Gym 0.7 writes beside a reward that counts; a verdict's field of the same name wins."""


def build_agent_reference(agent: str) -> Row:
    """Return the `agent_ref` of a row for *agent*, in NeMo Gym's form."""
    return {"type": "responses_api_agents", "name": agent}


# Messages and transcripts


class Message(BaseModel):
    """A chat message.

    As an action it is the policy's reply; in a `Reset` or `Step` it is what the policy sees next.
    """

    model_config = ConfigDict(frozen=True)

    role: Literal["user", "assistant", "system", "developer"] = "assistant"
    content: Content

    @property
    def text(self) -> str:
        """The text of the message, with its parts joined."""
        return extract_text(self.content)

    def item(self) -> Item:
        """Return the message as an input item."""
        return {"type": "message", "role": self.role, "content": self.content}


def _arguments_to_json(arguments: object) -> object:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, Mapping) else arguments


def _parse_finite(text: str) -> float:
    """Return a number in JSON text. Raises `ValueError` for NaN and infinity, which JSON does not have."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


class ToolCall(BaseModel):
    """A policy's call of one tool.

    Attributes:
        name: The tool's name.
        arguments: The arguments as JSON text, exactly as the policy wrote them. A mapping is converted to JSON.
        call_id: The id of the call. `Transcript.output` returns the output of the call with this id.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    arguments: Annotated[str, BeforeValidator(_arguments_to_json)] = "{}"
    call_id: str = ""

    def parsed(self) -> dict[str, Any] | None:
        """Return the arguments as a dict, or `None` if they are not a JSON object, or if UTF-8 cannot express them."""
        try:
            value = json.loads(self.arguments, parse_constant=_parse_finite, parse_float=_parse_finite)
        except (ValueError, RecursionError):
            return None
        return value if isinstance(value, dict) and not self.has_surrogates() else None

    def has_surrogates(self) -> bool:
        """Return whether the arguments contain an unpaired surrogate, half of a character.

        UTF-8 cannot express it, and a client that writes it, such as a client of MCP, loses its connection.
        """
        if self.arguments.isascii() and "\\ud" not in self.arguments.lower():
            return False
        try:
            self.arguments.encode()
            json.dumps(json.loads(self.arguments), ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return True
        except (ValueError, RecursionError):
            # It is no JSON.
            return False
        return False


Action: TypeAlias = Message | ToolCall
"""An action of the policy: a reply, or one tool call."""


def extract_text(content: Content | None) -> str:
    """Return the text of *content*: the string itself, or the text of its parts joined."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(text for part in content if isinstance(text := part.get("text"), str))


_OBJECT = frozenset({dict})


def is_object_list(value: object) -> TypeGuard[list[Item]]:
    """Return whether *value* is a list of JSON objects."""
    if not isinstance(value, list):
        return False
    # The first test runs in C; parsed JSON has no subclasses of dict.
    return _OBJECT.issuperset(map(type, value)) or all(isinstance(item, dict) for item in value)


def is_content(value: object) -> TypeGuard[Content | None]:
    """Return whether *value* can be the content of a message: text, a list of parts, or `None`."""
    return value is None or isinstance(value, str) or is_object_list(value)


def _is_text(value: object) -> bool:
    return value is None or isinstance(value, str)


def _is_parts(value: object) -> bool:
    return value is None or is_object_list(value)


_FieldCheck: TypeAlias = tuple[str, Callable[[object], bool], str]

_ANY_ITEM: tuple[_FieldCheck, ...] = (
    ("type", _is_text, "a string"),
    ("role", _is_text, "a string"),
    ("content", is_content, "text or a list of parts"),
)
_ITEM_CHECKS: dict[str, tuple[_FieldCheck, ...]] = {
    "function_call": (
        ("name", lambda value: isinstance(value, str), "a string"),
        ("call_id", _is_text, "a string"),
    ),
    "function_call_output": (
        ("call_id", _is_text, "a string"),
        ("output", is_content, "text or a list of parts"),
    ),
    "reasoning": (("summary", _is_parts, "a list of parts"),),
}
"""The fields of items that gymsdk reads, by the type of the item: the field, its check, and what it must be."""


def find_invalid_field(items: Iterable[object], where: str) -> tuple[str, str] | None:
    """Return the path of the first field of *items* that gymsdk cannot read, and what it must be, or `None`.

    Items of unknown types, unknown roles and further fields are valid. Null stands for a field that is left out.

    Args:
        items: The items of a conversation, as a client sent them.
        where: The path of the list.
    """
    for number, item in enumerate(items):
        if not isinstance(item, dict):
            return f"{where}.{number}", "an object"
        kind = item.get("type")
        checks = _ANY_ITEM if kind in (None, "message") else (*_ANY_ITEM, *_get_checks(kind))
        for name, is_valid, expected in checks:
            if not is_valid(item.get(name)):
                return f"{where}.{number}.{name}", expected
        for name in ("content", "output", "summary"):
            parts = item.get(name)
            for index, part in enumerate(parts) if isinstance(parts, list) else ():
                if isinstance(part, dict) and not _is_text(part.get("type")):
                    return f"{where}.{number}.{name}.{index}.type", "a string"
    return None


def _get_checks(kind: object) -> tuple[_FieldCheck, ...]:
    return _ITEM_CHECKS.get(kind, ()) if isinstance(kind, str) else ()


def find_invalid_tool(tools: Iterable[object], where: str) -> tuple[str, str] | None:
    """Return the path of the first field of *tools* that gymsdk cannot read, and what it must be, or `None`."""
    for number, tool in enumerate(tools):
        if not isinstance(tool, dict):
            return f"{where}.{number}", "an object"
        if not _is_text(tool.get("type")):
            return f"{where}.{number}.type", "a string"
        needs_name = tool.get("type") in (None, "function") and "function" not in tool
        if not isinstance(tool.get("name"), str) and (needs_name or tool.get("name") is not None):
            return f"{where}.{number}.name", "a string"
        if not isinstance(tool.get("parameters"), dict | None):
            return f"{where}.{number}.parameters", "an object"
    return None


def find_invalid_param(params: Item) -> tuple[str, str] | None:
    """Return the path of the first unreadable field of a Responses request, and what it must be, or `None`.

    Args:
        params: The request; a missing `input` is no invalid one.
    """
    for names, types, expected in _PARAM_TYPES:
        for name in names:
            if params.get(name) is not None and not isinstance(params[name], types):
                return name, expected
    output_format = (params.get("text") or {}).get("format")
    if output_format is not None and not isinstance(output_format, dict):
        return "text.format", "an object"
    if output_format and not isinstance(output_format.get("type"), str):
        return "text.format.type", "a string"
    prompt = params.get("input")
    invalid = find_invalid_field(prompt, "input") if isinstance(prompt, list) else None
    return invalid or find_invalid_tool(params.get("tools") or (), "tools")


_PARAM_TYPES: tuple[tuple[tuple[str, ...], tuple[type, ...], str], ...] = (
    (("input",), (str, list), "a string or a list of items"),
    (("tools",), (list,), "a list of tools"),
    (("instructions",), (str,), "a string"),
    (("max_output_tokens",), (int,), "an integer"),
    (("include",), (list,), "a list"),
    (("metadata", "reasoning", "stream_options", "text"), (dict,), "an object"),
)
"""The types of the fields of a Responses request that gymsdk reads."""


def is_reply(item: Item) -> bool:
    """Return whether *item* is a message written by the policy."""
    return item.get("role") == "assistant" and item.get("type", "message") == "message"


def is_policy_item(item: Item) -> bool:
    """Return whether the policy produced *item*, and not the environment."""
    # A tuple, because a client's item may have an unhashable type.
    return is_reply(item) or item.get("type") in ("function_call", "reasoning")


def iter_tool_calls(items: Iterable[Item], earlier: Iterable[Item] = ()) -> Iterator[ToolCall]:
    """Yield the function calls among *items*.

    Engines repeat ids. A call whose id another call before it has gets a unique one: `ID#2`, `ID#3` and so on.

    Args:
        items: The items of a conversation.
        earlier: The items before them.
    """
    used: dict[str, int] = {}
    for item in earlier:
        if item.get("type") == "function_call":
            _choose_call_id(item, used)
    for item in items:
        if item.get("type") == "function_call":
            arguments = item.get("arguments")
            yield ToolCall(
                name=str(item.get("name", "")),
                arguments=arguments if isinstance(arguments, str) else json.dumps(arguments),
                call_id=_choose_call_id(item, used),
            )


def _choose_call_id(item: Item, used: dict[str, int]) -> str:
    """Return an id for a call that is not in *used*, which counts the calls of each id, and add it there."""
    call_id = chosen = _get_call_id(item)
    while chosen in used:
        used[call_id] += 1
        chosen = f"{call_id}#{used[call_id]}"
    used[chosen] = 1
    return chosen


def pair_outputs(items: Iterable[Item]) -> dict[int, int]:
    """Return the index of the output of each tool call among *items*, by the index of the call.

    Engines repeat ids, in later turns and within one. An output belongs to the latest turn with a call of that id that
    has no output yet, and there to the first such call. Calls without an output and outputs without a call are left
    out.
    """
    pairs: dict[int, int] = {}
    # By id, the open calls of each turn that has some, in order.
    open_calls: defaultdict[str, list[deque[int]]] = defaultdict(list)
    last_turns: dict[str, int] = {}
    turn, was_policy = 0, False
    for index, item in enumerate(items):
        is_policy = is_policy_item(item)
        turn += is_policy and not was_policy
        was_policy = is_policy
        kind, call_id = item.get("type"), _get_call_id(item)
        if kind == "function_call":
            if last_turns.get(call_id) != turn:
                open_calls[call_id].append(deque())
            last_turns[call_id] = turn
            open_calls[call_id][-1].append(index)
        elif kind == "function_call_output" and open_calls[call_id]:
            pairs[open_calls[call_id][-1].popleft()] = index
            if not open_calls[call_id][-1]:
                open_calls[call_id].pop()
    return pairs


def _get_call_id(item: Item) -> str:
    return str(item.get("call_id", ""))


@dataclass(slots=True)
class Transcript:
    """The conversation of an episode.

    Attributes:
        opening: The items that the policy saw before its first turn.
        items: The policy's items and the environment's responses to them, in order.
        ended: Why the episode ended; `None` while it runs.
    """

    opening: list[Item] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)
    ended: EndReason | None = None

    @property
    def reply(self) -> str:
        """The text of the policy's last turn if that turn called no tool, else an empty string."""
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
        """Return all text that the policy wrote, without reasoning, joined without a separator."""
        return "".join(extract_text(item.get("content")) for item in self.items if is_reply(item))

    def calls(self, name: str | None = None) -> list[ToolCall]:
        """Return the tool calls in order; with *name*, only the calls of that tool.

        Each call has a unique id, even if the engine repeats ids: the second call with the id `ID` is `ID#2`.
        """
        return [call for call in iter_tool_calls(self.items) if name is None or call.name == name]

    def outputs(self) -> dict[str, str]:
        """Return the text outputs of the tools by the ids that `calls` returns; calls without an output are left out.

        An output that belongs to no call is under its own id.
        """
        call_ids: dict[int, str] = {}
        outputs: dict[int, Item] = {}
        used: dict[str, int] = {}
        for index, item in enumerate(self.items):
            if item.get("type") == "function_call":
                call_ids[index] = _choose_call_id(item, used)
            elif item.get("type") == "function_call_output":
                outputs[index] = item
        owners = {output: call_ids[call] for call, output in pair_outputs(self.items).items()}
        found: dict[str, str] = {}
        for index, item in outputs.items():
            call_id = owners.get(index) or _get_call_id(item)
            if index in owners or call_id not in used:
                found.setdefault(call_id, extract_text(item.get("output")))
        return found

    def output(self, call_id: str) -> str | None:
        """Return the text output of the call with this id, as `calls` returns it, or `None` if it has no output."""
        return self.outputs().get(call_id)


# The contract of an environment


def _check_prompt(params: Item) -> Item:
    if not isinstance(params.get("input"), str) and not is_object_list(params.get("input")):
        raise ValueError("`input` must be a string or a list of message objects")
    if params.get("tools") is not None and not is_object_list(params["tools"]):
        raise ValueError("`tools` must be a list of tool objects")
    if invalid := find_invalid_param(params):
        raise ValueError("`{}` must be {}".format(*invalid))
    return params


class Task(BaseModel):
    """One row of an environment.

    Subclass it to declare the row's fields; undeclared fields are kept.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    responses_create_params: Annotated[Item, AfterValidator(_check_prompt)]

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Reject fields that would hide a member of `Task`."""
        if hidden := sorted(cls.model_fields.keys() & {"ask", "input", "row"}):
            raise TypeError(
                f"a task cannot have a field {hidden[0]!r}: it would hide `Task.{hidden[0]}`; rename the field"
            )

    @classmethod
    def ask(cls, prompt: str, **fields: Any) -> Self:
        """Return a task that opens with *prompt* as a user message.

        Args:
            prompt: The text of the message.
            **fields: The task's other fields.
        """
        params = {"input": [{"role": "user", "content": prompt}]}
        return cls.model_validate({"responses_create_params": params, **fields})

    @property
    def input(self) -> list[Item]:
        """The row's prompt as items."""
        prompt: Content = self.responses_create_params["input"]
        return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt

    def row(self) -> Row:
        """Return the task as a JSON object.

        `Environment.row` adds the agent and the tools, which clients outside this process need.
        """
        return self.model_dump(mode="json")


class Config(BaseModel):
    """The settings of an environment.

    Subclass it. Give every field a default unless the user must choose a value.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


class State(BaseModel):
    """The mutable state of one episode, which `step` and tools change in place."""

    model_config = ConfigDict(extra="forbid")


def _default_to_user(message: object) -> object:
    if isinstance(message, str):
        return Message(role="user", content=message)
    if isinstance(message, Message) and "role" not in message.model_fields_set:
        return message.model_copy(update={"role": "user"})
    return message


EnvironmentMessage = Annotated[Message, BeforeValidator(_default_to_user)]
"""A message from the environment, or only its text; the role is `user` unless given."""


class Reset(BaseModel):
    """How an episode opens.

    Attributes:
        messages: Messages that follow the row's prompt.
        state: The initial state.
        tools: The names of the tools that the episode offers; `None` offers all.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    messages: list[EnvironmentMessage] = Field(default_factory=list)
    state: SerializeAsAny[State] = Field(default_factory=State)
    tools: list[str] | None = None


def _reject_assistant_messages(messages: list[Message]) -> list[Message]:
    if any(message.role == "assistant" for message in messages):
        raise ValueError("role 'assistant' is reserved for the policy; use another role for messages to the policy")
    return messages


class Step(BaseModel):
    """The environment's response to one action.

    Attributes:
        messages: New messages for the policy.
        output: The output of a tool call; only valid if the action is a `ToolCall`.
        reward: The reward of this step; it is added to the verdict's.
        done: Whether the episode is over.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    messages: Annotated[list[EnvironmentMessage], AfterValidator(_reject_assistant_messages)] = Field(
        default_factory=list
    )
    output: Content | None = None
    reward: float = 0.0
    done: bool = False


STEPS_COMPONENT = "steps"
"""The reward component that holds the rewards of the steps; the host adds it."""


class Verdict(BaseModel):
    """The judgement of a transcript.

    Subclass it to add fields, which are written at the top level of the rollout's line. A field that the class does not
    declare is an error unless a subclass sets `extra="allow"`.

    Attributes:
        reward: The reward of the transcript, without the rewards of the steps.
        components: Named parts of the reward; if given, they sum to *reward*.
        grader_timeout: Whether the grader used up its own budget on this transcript.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    reward: float
    components: dict[str, float] = Field(default_factory=dict)
    grader_timeout: bool = False

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Reject fields whose names are reserved on a rollout's line."""
        if reserved := sorted(cls.model_fields.keys() & ROLLOUT_FIELDS):
            raise TypeError(
                f"a verdict cannot have a field {reserved[0]!r}: every rollout's line has that field; rename yours"
            )

    @model_validator(mode="wrap")
    @classmethod
    def _explain_unknown_fields(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(value)
        except ValidationError as error:
            unknown = [detail["loc"][0] for detail in error.errors() if detail["type"] == "extra_forbidden"]
            if not unknown:
                raise
            name, known = str(unknown[0]), cls.model_fields
            suggestion = format_suggestion(name, known, f"its fields: {', '.join(known)}")
            advice = "subclass Verdict and declare it there" if cls is Verdict else f"declare it in {cls.__name__}"
            raise ValueError(f"{cls.__name__} has no field {name!r}{suggestion}. To add a field, {advice}") from None


class Claims(BaseModel):
    """Properties of one task that `gymsdk check` verifies.

    Attributes:
        maximum: The reward of a perfect policy.
        chance: The highest reward of a policy that does not understand the task.
        variants: Other replies that are correct.
    """

    model_config = ConfigDict(frozen=True)

    maximum: float = 1.0
    chance: float = 0.0
    variants: list[str] = Field(default_factory=list)


@dataclass(slots=True)
class Episode:
    """One play of a task, as data.

    Attributes:
        id: The episode's id.
        seed: The environment's seed, the same for every repeat of a task.
        task: The task.
        row: The row that the task was read from.
        environment: The environment that plays the episode, in this process or behind HTTP.
        state: The episode's state.
        transcript: The conversation so far.
        tools: The schemas of the tools that the episode offers.
        repeat: The number of this play among the plays of its task, from 0.
        deadline: When the episode must be over, as a time of the event loop's clock; `None` for no deadline.
        done: Whether the episode is over.
        paid: The sum of the rewards of the steps so far.
        episode_id: The id that hooks get: that of the episode, or a generated one for an episode without one.
        record: The rewards of the steps, and the calls of judges and user models.
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
    episode_id: str = ""
    record: EpisodeRecord = field(default_factory=EpisodeRecord)


# Protocols


class Playable(Protocol):
    """An environment that an episode can be played in: in this process, or behind HTTP."""

    @property
    def name(self) -> str:
        """The environment's name."""

    async def reset(
        self, row: Row | Task, *, seed: int = 0, id: str = "", repeat: int = 0, deadline: float | None = None
    ) -> Episode:
        """Open an episode of *row*."""

    async def step(self, episode: Episode, action: Action) -> Step:
        """Respond to one tool call or reply, and add the reward of the step to `episode.paid`."""

    async def verify(self, episode: Episode) -> Verdict:
        """Judge the episode's transcript."""

    async def close(self, episode: Episode) -> None:
        """Release what `reset` acquired."""


@runtime_checkable
class Model(Protocol):
    """A model that answers Responses API requests.

    Annotate a `Config` field with it to require a model as a setting.
    """

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:
        """Return the Response object for *request*.

        Args:
            request: The body of `POST /v1/responses`.
            episode: The episode that the request belongs to, if any.

        Raises:
            Failed: The model gives no response.
        """


# Rollouts


class Budget(BaseModel):
    """The limits of one episode; *output* is the maximum length of one tool output in characters."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # Excluded from rows and run folders: it only protects a run against excessive outputs.
    output: Annotated[int, Flag(LIMITS, "CHARS", ("--max-output",), shown="4 Mi", layered=True)] = Field(
        MAX_OUTPUT_CHARS, ge=1000, exclude=True, description="Limit the output of a tool call."
    )
    turns: Annotated[int, Flag(LIMITS, "N")] = Field(32, ge=1, description="Limit an episode to N model calls.")
    tools: Annotated[int, Flag(LIMITS, "N", ("--tool-calls",))] = Field(
        128, ge=0, description="Limit an episode to N tool calls."
    )
    seconds: Annotated[float, Flag(LIMITS, "SECONDS", ("--deadline",), least=0.001)] = Field(
        600.0, gt=0, description="Limit the duration of an episode."
    )


class Failure(BaseModel):
    """Why a rollout has no reward.

    Attributes:
        stage: Where the episode failed: `reset`, `model`, `step`, `verify` or `close`.
        kind: A machine-readable word for the failure.
        message: The failure as a sentence.
        retryable: Whether another attempt may succeed.
        retry_after: Seconds to wait before that attempt; `None` if unknown.
    """

    model_config = ConfigDict(frozen=True)

    stage: str
    kind: str
    message: str
    retryable: bool = False
    retry_after: float | None = None


class Timing(BaseModel):
    """The time one rollout took, in milliseconds.

    Attributes:
        total: The sum over all stages.
        stages: The time per stage, with repeated calls of a stage summed.
        model_calls: The time of each model call, in order.
        started: When the rollout began, in seconds since the epoch; `None` if unknown.
        turns: For each turn, when it began after *started*, the time of its model call, and the time of its steps.
    """

    model_config = ConfigDict(frozen=True)

    total: float = 0.0
    stages: dict[str, float] = Field(default_factory=dict)
    model_calls: list[float] = Field(default_factory=list)
    started: float | None = None
    turns: list[tuple[float, float, float]] = Field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ToolRun:
    """One tool call of an episode and its timing.

    Attributes:
        call_id: The id of the call.
        name: The tool's name.
        started: When the call began, in seconds since the epoch.
        milliseconds: How long the call took.
        answered: Whether the environment ran the call; it does not run calls after the end of an episode.
    """

    call_id: str
    name: str
    started: float
    milliseconds: float = 0.0
    answered: bool = True


@dataclass(frozen=True, slots=True)
class ModelCall:
    """Details of one model call that the rollout's joined response does not contain.

    Attributes:
        started: When the call began, in seconds since the epoch.
        milliseconds: How long the call took.
        response: The response without its output.
        first: The index of the call's first item in the transcript.
        count: The number of the call's items.
        tools: The tool calls that the model made, in order.
    """

    started: float
    milliseconds: float
    response: Item
    first: int
    count: int
    tools: tuple[ToolRun, ...] = ()


class Usage(BaseModel):
    """Tokens used by one or more model calls; a detail is `None` if a call did not report it."""

    model_config = ConfigDict(frozen=True)

    input_tokens: int = 0
    output_tokens: int = 0
    total_tokens: int = 0
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None
    calls: int = 0


class Rollout(BaseModel):
    """One finished play of one task.

    Attributes:
        id: The rollout's id.
        rollout_id: The id in the logs of the servers that played it, if different from *id*.
        environment: The environment's name.
        row: The task's row.
        seed: The environment's seed.
        repeat: The number of this play among the plays of its task, from 0.
        outcome: How the rollout ended.
        ended: Why the episode ended.
        sampling: The request parameters that overrode the row's.
        opening: The items that the policy saw before its first turn.
        tools: The schemas of the offered tools.
        response: The last response, with all items of the episode as its output and the usage summed.
        reward: The sum of the verdict's and the steps' rewards; set if and only if *outcome* is `scored`.
        components: Named parts that sum to *reward*.
        verdict: The verdict; set if and only if *outcome* is `scored`.
        failure: Why there is no reward; set if and only if *outcome* is not `scored`.
        turns: The number of the policy's turns.
        usage: Token usage by role.
        timing: How long the stages took.
        calls: The model calls, if the episode was played in this process.
        record: The rewards of the steps, and the calls of judges and user models.
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
    sampling: Item = Field(default_factory=dict)
    opening: list[Item] = Field(default_factory=list)
    tools: list[Item] = Field(default_factory=list)
    response: Item | None = None
    reward: float | None = None
    components: dict[str, float] = Field(default_factory=dict)
    verdict: SerializeAsAny[Verdict] | None = None
    failure: Failure | None = None
    turns: int = 0
    usage: dict[str, Usage] = Field(default_factory=dict)
    timing: Timing = Timing()
    calls: list[ModelCall] = Field(default_factory=list, exclude=True, repr=False)
    record: EpisodeRecord = Field(default_factory=EpisodeRecord, exclude=True, repr=False)
