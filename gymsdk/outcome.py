"""How a play ended: the rollout, with its reward or its failure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, SerializeAsAny

from gymsdk.transcript import Ended, Item
from gymsdk.types import Row, Verdict
from gymsdk.usage import Usage

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
    ended: Ended | None = None
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
