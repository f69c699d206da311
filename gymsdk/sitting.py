"""A sitting: one episode while it is played, opened, answered turn by turn, judged and closed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from gymsdk import cutting, responses, turns, usage, wire
from gymsdk.errors import EpisodeError, Failed, Unscorable
from gymsdk.outcome import Failure, ModelCall, Outcome, Rollout, Timing, ToolRun
from gymsdk.plugins import answers
from gymsdk.transcript import Action, Ended, Item, ToolCall, Transcript
from gymsdk.types import Episode, Playable, Row, Step, Task, Verdict

SHORT = 0.1
"""The share of an episode's seconds that a step must have had to be blamed for the deadline."""

TOLD = frozenset({"id", "model", "status", "incomplete_details", "usage"})
"""The fields of a response that are kept for each model call."""

log = logging.getLogger("gymsdk")


class Budget(BaseModel):
    """What one episode may use: model calls, tool calls, seconds from its reset to its last turn.

    Of one tool's *output* that many characters are shown.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    turns: int = Field(default=32, ge=1)
    tools: int = Field(default=128, ge=0)
    seconds: float = Field(default=600.0, gt=0)
    # It keeps out what breaks a run, and is no part of what a run is: no row or folder says it.
    output: int = Field(default=cutting.LONGEST, ge=1000, exclude=True)


@dataclass(slots=True)
class Taken:
    """What came of one turn: the items to show the policy next, what it paid, whether a budget or it ended."""

    items: list[Item] = field(default_factory=list)
    reward: float = 0.0
    calls: int = 0
    ended: Ended | None = None
    runs: list[ToolRun] = field(default_factory=list)


async def take(
    environment: Playable,
    episode: Episode,
    output: Sequence[Item],
    result: Taken,
    *,
    calls_left: int = 128,
    max_output_chars: int = cutting.LONGEST,
) -> None:
    """Answer the actions in *output*, one `step` each, in order; what comes of it is *taken*, and on the transcript.

    After the episode is done, or the tool budget spent, a turn's remaining calls are answered `not run`. Where a step
    raises, what came before it stays. An output beyond the *longest* is cut.
    """
    messages: list[Item] = []
    episode.transcript.items.extend(output)
    acts = turns.actions(output)
    try:
        for action in acts:
            if result.ended or (isinstance(action, ToolCall) and result.calls >= calls_left):
                result.ended = result.ended or "tools"
                result.items.append(_unrun(action))
                result.runs += _run(action, time.time(), answered=False)
                continue
            began, started = time.time(), time.perf_counter()
            step = await environment.step(episode, action)
            result.runs += _run(action, began, milliseconds=(time.perf_counter() - started) * 1e3)
            result.reward = answers.total(result.reward, step.reward, "step")
            result.items.extend(_output(action, step, max_output_chars))
            result.calls += isinstance(action, ToolCall)
            messages += [message.item() for message in step.messages]
            result.ended = "done" if step.done else None
    finally:
        result.items += messages
        episode.transcript.items.extend(result.items)
    if not acts:
        # Nothing to answer: asking again on the same history loops for hours with reasoning models.
        result.ended = "done"
    episode.done = result.ended is not None


def _output(action: Action, step: Step, longest: int) -> list[Item]:
    if not isinstance(action, ToolCall):
        return []
    return [wire.function_call_output(action.call_id, cutting.cut(step.output or "", longest))]


def _run(action: Action, started: float, *, milliseconds: float = 0.0, answered: bool = True) -> list[ToolRun]:
    if not isinstance(action, ToolCall):
        return []
    return [ToolRun(action.call_id, action.name, started, round(milliseconds, 3), answered)]


def _unrun(action: Action) -> Item:
    call_id = action.call_id if isinstance(action, ToolCall) else ""
    return wire.function_call_output(call_id, turns.NOT_RUN)


class Sitting:
    """One episode of *environment* while it is played within *budget*.

    `open` it, give `answer` the model's responses until it is `over`, `judge`, `close`; `rollout` is what came of it.
    Whoever catches an `EpisodeError` of one of these hands it over as the *ending*. One of `close` is *unreleased*.
    """

    def __init__(
        self, environment: Playable, budget: Budget | None = None, sampling: Mapping[str, Any] | None = None
    ) -> None:
        self.environment = environment
        self.budget = budget or Budget()
        self.sampling = dict(sampling or {})
        self.episode: Episode | None = None
        self.result: Verdict | EpisodeError | None = None
        self.close_error: EpisodeError | None = None
        self.usage: usage.Ledger = {}
        self._opened: _Opened | None = None
        self._response: Item | None = None
        self._paid = 0.0
        self._turns = 0
        self._calls = 0
        self._stages: dict[str, float] = {}
        self._model_calls: list[float] = []
        self._asked_at: float | None = None
        self._observed: list[ModelCall] = []

    @property
    def is_over(self) -> bool:
        """Whether the policy has no turn left."""
        return self.result is not None or (self.episode is not None and self.episode.transcript.ended is not None)

    @contextmanager
    def time_stage(self, stage: str) -> Iterator[None]:
        """Count the time and the tokens of what runs inside to *stage*."""
        started = time.perf_counter()
        if stage == "model":
            self._asked_at = time.time()
        try:
            with usage.counted(self.usage):
                yield
        finally:
            spent = (time.perf_counter() - started) * 1e3
            self._stages[stage] = self._stages.get(stage, 0.0) + spent
            if stage == "model":
                self._model_calls.append(round(spent, 3))

    async def open(self, row: Row | Task, *, seed: int = 0, id: str = "", repeat: int = 0) -> Episode:
        """Reset the environment; raises `EpisodeError`, and `UsageError` where the row does not fit."""
        self._opened = _Opened(row.row() if isinstance(row, Task) else row, id, seed, repeat)
        with self.time_stage("reset"):
            self.episode = await self.environment.reset(row, seed=seed, id=id, repeat=repeat, deadline=self._from_now())
        return self.episode

    def restart_deadline(self) -> None:
        """Let the episode's seconds count anew: the time a policy outside takes is not the environment's."""
        if self.episode:
            self.episode.deadline = self._from_now()

    def pause_deadline(self) -> None:
        """Stop the episode's seconds between two turns, while a policy outside of gymsdk decides on its next one."""
        if self.episode:
            self.episode.deadline = None

    def limit_turns(self, turns: int) -> None:
        """Let the episode have at most *turns* turns in all; it is judged when they are over."""
        self.budget = self.budget.model_copy(update={"turns": min(turns, self.budget.turns)})

    async def apply_response(self, response: Item) -> Taken:
        """Give what came of the turn in *response*; what ended the episode is on its transcript."""
        episode = self._playing()
        self._turns += 1
        self._response = response
        first = len(episode.transcript.items)
        with self.time_stage("step"):
            usage.note("policy", response)
            taken = await self._taken(episode, response)
        self._observe(response, first, taken)
        self._paid = answers.total(self._paid, taken.reward, "step")
        self._calls += taken.calls
        if taken.ended is None and self._turns >= self.budget.turns:
            taken.ended = "turns"
        episode.transcript.ended = taken.ended
        return taken

    async def verify(self) -> None:
        """Have the transcript judged: the verdict is the *ending*. Raises `EpisodeError`."""
        with self.time_stage("verify"):
            verdict = await self.environment.verify(self._playing())
        answers.total(self._paid, verdict.reward, "verify")
        self.result = verdict

    async def close(self) -> None:
        """Close the episode, if there is one."""
        if self.episode is None:
            return
        with self.time_stage("close"):
            try:
                await self.environment.close(self.episode)
            except EpisodeError as error:
                # The verdict stands: what was graded does not change because the cleaning up failed.
                log.warning("episode %s: %s", self.episode.id or "without an id", error)
                self.close_error = error

    def build_rollout(self) -> Rollout:
        """Give the rollout of what was played, its *ending* known."""
        assert self.result is not None, "a rollout has an ending"
        assert self._opened is not None, "a rollout was opened"
        episode, verdict = self.episode, self.result if isinstance(self.result, Verdict) else None
        transcript = episode.transcript if episode else Transcript()
        stages = {stage: round(spent, 3) for stage, spent in self._stages.items()}
        return Rollout(
            id=self._opened.id,
            environment=self.environment.name,
            row=self._opened.row,
            seed=self._opened.seed,
            repeat=self._opened.repeat,
            outcome=_outcome(self.result),
            ended=transcript.ended,
            sampling=self.sampling,
            opening=transcript.opening,
            tools=episode.tools if episode else [],
            response=self._whole_response(transcript),
            reward=None if verdict is None else verdict.reward + self._paid,
            components={} if verdict is None else components(verdict, self._paid),
            verdict=verdict,
            failure=_failure(self.result) if isinstance(self.result, EpisodeError) else None,
            turns=self._turns,
            usage=dict(self.usage),
            timing=Timing(total=round(sum(stages.values()), 3), stages=stages, model_calls=self._model_calls),
            calls=self._observed,
        )

    def _observe(self, response: Item, first: int, taken: Taken) -> None:
        """Keep what the rollout's response, which joins those of all turns, does not tell of one of them."""
        spent = self._model_calls[-1] if self._asked_at is not None and self._model_calls else 0.0
        about = {key: value for key, value in response.items() if key in TOLD}
        asked_at, self._asked_at = self._asked_at or time.time(), None
        count = len(response["output"])
        self._observed.append(ModelCall(asked_at, spent, about, first, count, tuple(taken.runs)))

    def _playing(self) -> Episode:
        assert self.episode is not None, "a sitting is opened first"
        return self.episode

    def _from_now(self) -> float:
        return asyncio.get_running_loop().time() + self.budget.seconds

    async def _taken(self, episode: Episode, response: Item) -> Taken:
        """Give what came of one turn; out of time where the deadline passed in a step that had hardly any left."""
        output: list[Item] = response["output"]
        if responses.is_incomplete(response):
            episode.transcript.items.extend(output)
            return Taken(ended="tokens")
        taken, started = Taken(), time.perf_counter()
        try:
            calls_left, longest = self.budget.tools - self._calls, self.budget.output
            await take(self.environment, episode, output, taken, calls_left=calls_left, max_output_chars=longest)
        except Failed as error:
            # The model spent the episode's time; the code that was asked last is not to blame.
            late = time.perf_counter() - started < SHORT * self.budget.seconds
            if error.kind not in {"hook_timeout", "tool_timeout"} or not late:
                raise
            taken.ended = "deadline"
        return taken

    def _whole_response(self, transcript: Transcript) -> Item | None:
        if self._response is None and transcript.ended is None:
            return None
        return (self._response or wire.response([], model="", status="incomplete")) | {
            "output": transcript.items,
            "usage": usage.body(self.usage.get("policy", usage.Usage())),
        }


@dataclass(frozen=True, slots=True)
class _Opened:
    """What a sitting was opened with."""

    row: Row
    id: str
    seed: int
    repeat: int


def _outcome(ending: Verdict | EpisodeError) -> Outcome:
    if isinstance(ending, Verdict):
        return "scored"
    return "unscorable" if isinstance(ending, Unscorable) else "failed"


def components(verdict: Verdict, paid: float) -> dict[str, float]:
    """Give the parts of a reward: those of its *verdict*, and what the steps *paid*."""
    if not paid:
        return dict(verdict.components)
    return (verdict.components or {"verdict": verdict.reward}) | {answers.STEPS: paid}


def _failure(error: EpisodeError) -> Failure:
    return Failure(
        stage=error.stage or "",
        kind=error.kind,
        message=str(error),
        retryable=error.retryable,
        retry_after=error.retry_after,
    )
