"""Bodies: what NeMo Gym's typed requests to a resources server hold."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gymsdk.servers.app import Refused
from gymsdk.servers.door.routing import ID
from gymsdk.types import Row

T = TypeVar("T", bound=BaseModel)


class EpisodeId(BaseModel):
    """Which rollout, and which attempt at it, in NeMo Gym's typed bodies."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rollout_id: str = Field(pattern=f"^{ID}$")
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


class TypedSeed(BaseModel):
    """The typed body that opens a session."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    resources_session_id: str
    episode_id: EpisodeId
    task_id: TaskId
    task_data: dict[str, Any]


class TypedClose(BaseModel):
    """The typed body that closes a session."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    resources_session_id: str
    episode_id: EpisodeId | None = None


def read(kind: type[T], body: Row) -> T:
    """Give *body* as what its *kind* of request holds; raises `Refused` where it does not fit."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False)
        shape = [{**each, "loc": ["body", *each["loc"]]} for each in found]
        raise Refused(422, "the body does not fit", shape=shape) from None
