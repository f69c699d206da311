"""What flows: a task becomes an episode, its turns a transcript, the transcript a verdict.

Items are objects of the OpenAI Responses API, kept as plain JSON from end to end
(https://platform.openai.com/docs/api-reference/responses).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol, Self, TypeAlias, runtime_checkable

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SerializeAsAny

Item: TypeAlias = dict[str, Any]
"""One Responses item, part or body: a JSON object."""

Row: TypeAlias = dict[str, Any]
"""One line of a task file: `responses_create_params` and the environment's own fields."""

Content: TypeAlias = str | list[Item]
"""Text, or a list of content parts (images are parts)."""

Ended: TypeAlias = Literal["done", "turns", "tools", "tokens", "deadline"]
"""Why an episode ended: by itself, or because a budget ran out."""


def _prompt(params: Item) -> Item:
    if not isinstance(params.get("input"), str) and not _are_objects(params.get("input")):
        raise ValueError("`input` must be a string or a list of message objects")
    if params.get("tools") is not None and not _are_objects(params["tools"]):
        raise ValueError("`tools` must be a list of tool objects")
    return params


def _are_objects(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)


class Task(BaseModel):
    """One row of an environment: subclass it to declare the row's own fields; undeclared ones are kept."""

    model_config = ConfigDict(frozen=True, extra="allow")

    responses_create_params: Annotated[Item, AfterValidator(_prompt)]

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
        """Give the task as a JSON object."""
        return self.model_dump(mode="json")


class Config(BaseModel):
    """An environment's settings: subclass it; every field needs a default unless the user must choose."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


class State(BaseModel):
    """What an episode remembers: the one mutable model, changed in place by `step` and tools."""

    model_config = ConfigDict(extra="forbid")


class Message(BaseModel):
    """A chat message: as an action it is the policy's plain reply, in a reset or step what it sees next."""

    model_config = ConfigDict(frozen=True)

    role: Literal["user", "assistant", "system", "developer"] = "assistant"
    content: Content

    @property
    def text(self) -> str:
        """The message's text, its parts joined."""
        return text_of(self.content)

    def item(self) -> Item:
        """Give the message as an input item."""
        return {"type": "message", "role": self.role, "content": self.content}


def _as_json(arguments: object) -> object:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, Mapping) else arguments


class ToolCall(BaseModel):
    """A policy's call of one tool, its arguments verbatim as JSON text (a mapping is written as JSON)."""

    model_config = ConfigDict(frozen=True)

    name: str
    arguments: Annotated[str, BeforeValidator(_as_json)] = "{}"
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


def _from_user(message: object) -> object:
    if isinstance(message, str):
        return Message(role="user", content=message)
    if isinstance(message, Message) and "role" not in message.model_fields_set:
        return message.model_copy(update={"role": "user"})
    return message


Said = Annotated[Message, BeforeValidator(_from_user)]
"""What an environment says: a message, or just its text; the user's unless its role is given."""


class Reset(BaseModel):
    """How an episode opens: messages after the row's own prompt, the state, the names of the tools on offer."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    messages: list[Said] = []
    state: SerializeAsAny[State] = Field(default_factory=State)
    tools: list[str] | None = None


def _not_the_policys(messages: list[Message]) -> list[Message]:
    if any(message.role == "assistant" for message in messages):
        raise ValueError("the assistant is the policy itself; what it sees next has another role")
    return messages


class Step(BaseModel):
    """The answer to one action: a tool's *output* or new *messages*, what it pays, whether the episode is over."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    messages: Annotated[list[Said], AfterValidator(_not_the_policys)] = []
    output: Content | None = None
    reward: float = 0.0
    done: bool = False


LINE = frozenset({"responses_create_params", "response", "reward_components", "agent_ref", "gymsdk"})
"""What a rollout's line holds beside the row's fields and the verdict's."""


class Verdict(BaseModel):
    """The judgement of a transcript: subclass it to add fields, which go flat onto the rollout's line.

    *components*, where given, sum to *reward*. *grader_timeout* says that the grader spent its own budget on
    this answer.
    """

    model_config = ConfigDict(frozen=True)

    reward: float
    components: dict[str, float] = {}
    grader_timeout: bool = False

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Refuse a field that would take the place of something else on the rollout's line."""
        if taken := sorted(cls.model_fields.keys() & LINE):
            raise TypeError(f"a verdict's field may not be called {taken[0]!r}: a rollout's line has its own")


class Claims(BaseModel):
    """What an environment may be held to on one task.

    *maximum* is the reward of a perfect policy, *chance* what a policy earns at most without understanding the
    task, *variants* other replies that are right.
    """

    model_config = ConfigDict(frozen=True)

    maximum: float = 1.0
    chance: float = 0.0
    variants: list[str] = []


def text_of(content: Content | None) -> str:
    """Give the text in *content*: a string itself, or the text of its parts joined."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(text for part in content if isinstance(text := part.get("text"), str))


def is_reply(item: Item) -> bool:
    """Whether *item* is a message of the policy."""
    return item.get("role") == "assistant" and item.get("type", "message") == "message"


@dataclass(slots=True)
class Transcript:
    """What was said: the *opening* the policy was shown, then its own *items* and the environment's answers."""

    opening: list[Item] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)
    ended: Ended | None = None

    @property
    def reply(self) -> str:
        """The text of the policy's last turn where that turn called no tool, else an empty string."""
        parts: list[str] = []
        for item in reversed(self.items):
            kind = item.get("type", "message")
            if kind == "function_call":
                return ""
            if is_reply(item):
                parts.append(text_of(item.get("content")))
            elif kind != "reasoning" and (parts or kind != "message"):
                break
        return "".join(reversed(parts))

    def text(self) -> str:
        """Give every text the policy wrote, reasoning excluded, joined without a separator."""
        return "".join(text_of(item.get("content")) for item in self.items if is_reply(item))

    def calls(self, name: str | None = None) -> list[ToolCall]:
        """Give the tool calls in order, all or those of one *name*."""
        return [call for call in tool_calls(self.items) if name is None or call.name == name]

    def output(self, call_id: str) -> str | None:
        """Give the text that answered the call with this id, or `None` where none did."""
        for item in self.items:
            if item.get("type") == "function_call_output" and item.get("call_id") == call_id:
                return text_of(item.get("output"))
        return None


def tool_calls(items: Iterable[Item]) -> Iterator[ToolCall]:
    """Yield the function calls among *items*."""
    for item in items:
        if item.get("type") == "function_call":
            arguments = item.get("arguments")
            yield ToolCall(
                name=str(item.get("name", "")),
                arguments=arguments if isinstance(arguments, str) else json.dumps(arguments),
                call_id=str(item.get("call_id", "")),
            )


@dataclass(slots=True)
class Episode:
    """One play of a task: data only; *environment* is whoever can reset, step, verify and close it.

    *seed* is the environment's, the same for every *repeat* of a task; *tools* are the schemas on offer;
    *deadline* is a time of the event loop's clock.
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
