"""How a play ended: the rollout, with its reward or its failure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, SerializeAsAny

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


class Rollout(BaseModel):
    """One finished play of one task.

    *reward* and *verdict* are there if and only if *outcome* is `scored`, *failure* if and only if it is not.
    *sampling* went over the row's own parameters, *opening* is what the policy was shown first.
    *response* is the last model answer with every item of the episode as its output and the usage summed.
    *rollout_id* is what the servers' logs call it, where servers played it under another name than *id*.
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
