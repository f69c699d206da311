"""The record of an episode: the rewards of its steps, and the calls of the models that its environment asked."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from gymsdk.errors import EpisodeError

MAX_CALL_BYTES = 2**20
"""The size of the recorded calls of one episode, as JSON."""

RECORD_FIELDS = STEP_REWARDS, MODEL_CALLS, CALLS_LEFT_OUT = (
    "step_rewards",
    "environment_calls",
    "environment_calls_left_out",
)
"""The fields of a line's `gymsdk` key with the record; each is missing if it says nothing."""


@dataclass(slots=True)
class EpisodeRecord:
    """The rewards and the calls of one episode.

    Attributes:
        step_rewards: The reward of each step that the environment played, in order.
        calls: The calls of judges and user models as JSON objects, in the order of their ends: `role` (the setting with
            the model), `stage` (`reset`, `step`, `verify` or `close`), in a step also `step` (its index), `seconds`,
            `request`, and `answer` or `error`.
        left_out: The number of further calls: the oldest, for which `MAX_CALL_BYTES` left no room, and those that
            `leave_out_calls` dropped.
    """

    step_rewards: list[float] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    left_out: int = 0
    _sizes: deque[int] = field(default_factory=deque, repr=False, compare=False)
    _bytes: int = field(default=0, repr=False, compare=False)

    def to_fields(self) -> dict[str, Any]:
        """Return the fields of a line's `gymsdk` key with the record."""
        fields: dict[str, Any] = {STEP_REWARDS: self.step_rewards} if any(self.step_rewards) else {}
        if self.calls:
            fields[MODEL_CALLS] = self.calls
        if self.left_out:
            fields[CALLS_LEFT_OUT] = self.left_out
        return fields

    def copy(self) -> EpisodeRecord:
        """Return a record that continues this one."""
        return EpisodeRecord([*self.step_rewards], [*self.calls], self.left_out, self._sizes.copy(), self._bytes)

    def without_calls(self) -> EpisodeRecord:
        """Return a record with all calls left out."""
        return EpisodeRecord([*self.step_rewards], left_out=self.left_out + len(self.calls))

    def order_steps(self, order: Sequence[int | None]) -> None:
        """Put the steps into another order.

        Args:
            order: The indices of the steps; `None` stands for a step that was not recorded. The others come last.
        """
        steps = [*order, *sorted({*range(len(self.step_rewards))} - {*order})]
        places = {step: place for place, step in enumerate(steps)}
        self.step_rewards = [0.0 if step is None else self.step_rewards[step] for step in steps]
        self.calls = [
            call | {"step": places.get(call["step"], call["step"])} if "step" in call else call for call in self.calls
        ]

    @property
    def call_count(self) -> int:
        """The number of all calls, also the ones without room."""
        return self.left_out + len(self.calls)

    def select_calls(self, first: int) -> EpisodeRecord:
        """Return a record of the calls after the *first* ones, without rewards."""
        # The calls that were left out are the oldest, so that each other one keeps its number.
        kept = first - self.left_out
        return EpisodeRecord(calls=self.calls[max(kept, 0) :], left_out=max(-kept, 0))

    def add_call(self, call: dict[str, Any], size: int) -> None:
        """Add a call of *size* bytes.

        The oldest calls give way: each request of a user model repeats the conversation, and a judge is asked last.
        """
        self.calls.append(call)
        self._sizes.append(size)
        self._bytes += size
        while self._bytes > MAX_CALL_BYTES:
            del self.calls[0]
            self._bytes -= self._sizes.popleft()
            self.left_out += 1

    def leave_out_calls(self) -> None:
        """Drop the calls, and count them as left out."""
        self.left_out += len(self.calls)
        self.calls, self._sizes, self._bytes = [], deque(), 0


class record_stage:  # noqa: N801 - a context manager, used like a function
    """Record the calls of models inside the block in *record*, as calls of *stage*.

    An `EpisodeError` that leaves the block gets the record: nothing else remains of an episode that did not open.
    """

    __slots__ = ("_record", "_stage", "_token")

    def __init__(self, stage: str, record: EpisodeRecord) -> None:
        self._stage = stage
        self._record: EpisodeRecord | None = record

    def __enter__(self) -> None:
        self._token = _current_stage.set(self)

    def __exit__(self, *error_info: object) -> None:
        _current_stage.reset(self._token)
        error, record = error_info[1], self._record
        # A task that outlives the stage, such as one that batches the calls of all episodes, keeps this context.
        self._record = None
        if not isinstance(error, EpisodeError):
            return
        if error.record is not None and error.record is not record:
            # Such a task may fail all its episodes with one error, and each episode needs its own record.
            own = copy(error)
            own.record = record
            raise own from error.__cause__
        error.record = record

    def describe(self) -> dict[str, Any]:
        """Return the stage, and the index of the running step."""
        step = {"step": len(self._record.step_rewards)} if self._record is not None and self._stage == "step" else {}
        return {"stage": self._stage, **step}

    def add_call(self, call: dict[str, Any], size: int) -> None:
        """Add a call of *size* bytes, unless the stage is over."""
        if self._record is not None:
            self._record.add_call(call, size)


_current_stage: ContextVar[record_stage | None] = ContextVar("gymsdk_recorded_stage", default=None)


def get_recorded_stage() -> record_stage | None:
    """Return the stage in which this code runs, `None` outside an episode.

    A task keeps the stage in which it was started. If it asks a model for another episode, as a task that batches the
    calls of all episodes does, the call belongs to the episode of that stage, and to none once the stage is over: hooks
    do not get the episode, so that nothing else says for which one the task asks.
    """
    return _current_stage.get()
