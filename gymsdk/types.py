"""What flows: a task becomes an episode, its turns a transcript, the transcript a verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol, Self, TypeAlias, runtime_checkable

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

from gymsdk.errors import suggestion
from gymsdk.transcript import Action, Content, Item, Message, Transcript, are_objects

Row: TypeAlias = dict[str, Any]
"""One line of a task file: `responses_create_params` and the environment's own fields."""


AGENT = "_simple_agent"
"""Suffix that makes the name of an environment's agent (`agent_ref` of a row)."""


def agent_reference(agent: str) -> Row:
    """Return how a row names the *agent* it is for, in NeMo Gym's form."""
    return {"type": "responses_api_agents", "name": agent}


def _prompt(params: Item) -> Item:
    if not isinstance(params.get("input"), str) and not are_objects(params.get("input")):
        raise ValueError("`input` must be a string or a list of message objects")
    if params.get("tools") is not None and not are_objects(params["tools"]):
        raise ValueError("`tools` must be a list of tool objects")
    return params


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
        """Return the task as a JSON object; `Environment.row` adds the agent and the tools, for clients elsewhere."""
        return self.model_dump(mode="json")


class Config(BaseModel):
    """An environment's settings: subclass it; every field needs a default unless the user must choose."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


class State(BaseModel):
    """What an episode remembers: the one mutable model, changed in place by `step` and tools."""

    model_config = ConfigDict(extra="forbid")


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

UNMASKED: Mapping[str, Any] = {"mask_sample": False, "failure_kind": None, "failure_reason": None}
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
        if taken := sorted(cls.model_fields.keys() & LINE):
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
            near = suggestion(name, known, f"its fields: {', '.join(known)}")
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
