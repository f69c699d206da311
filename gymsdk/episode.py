"""One episode, played: the loop between a model and whatever answers its actions, written once."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from gymsdk import responses, turns, usage, wire
from gymsdk.errors import EpisodeError, Failed, Unscorable, UsageError
from gymsdk.outcome import Failure, Outcome, Rollout, Timing
from gymsdk.plugins.answers import STEPS
from gymsdk.transcript import Action, Ended, Item, ToolCall, Transcript
from gymsdk.types import Episode, Model, Playable, Row, Step, Task, Verdict

SHORT = 0.1
"""The share of an episode's seconds that a step must have had to be blamed for the deadline."""

log = logging.getLogger("gymsdk")


class Budget(BaseModel):
    """What one episode may use: model calls, tool calls, seconds from its reset to its last turn."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    turns: int = Field(default=32, ge=1)
    tools: int = Field(default=128, ge=0)
    seconds: float = Field(default=600.0, gt=0)


@dataclass(slots=True)
class Taken:
    """What came of one turn: the items to show the policy next, what it paid, whether a budget or it ended."""

    items: list[Item] = field(default_factory=list)
    reward: float = 0.0
    calls: int = 0
    ended: Ended | None = None


async def take(environment: Playable, episode: Episode, output: Sequence[Item], *, calls_left: int = 128) -> Taken:
    """Answer the actions in *output*, one `step` each, in order; the episode's transcript gains both sides.

    After the episode is done, or the tool budget spent, a turn's remaining calls are answered `not run`.
    """
    taken, messages = Taken(), []
    episode.transcript.items.extend(output)
    acts = turns.actions(output)
    for action in acts:
        if taken.ended or (isinstance(action, ToolCall) and taken.calls >= calls_left):
            taken.ended = taken.ended or "tools"
            taken.items.append(_unrun(action))
            continue
        step = await environment.step(episode, action)
        taken.reward += step.reward
        taken.items.extend(_output(action, step))
        taken.calls += isinstance(action, ToolCall)
        messages += [message.item() for message in step.messages]
        taken.ended = "done" if step.done else None
    taken.items += messages
    if not acts:
        # Nothing to answer: asking again on the same history loops for hours with reasoning models.
        taken.ended = "done"
    episode.transcript.items.extend(taken.items)
    episode.done = taken.ended is not None
    return taken


def _output(action: Action, step: Step) -> list[Item]:
    if not isinstance(action, ToolCall):
        return []
    return [wire.function_call_output(action.call_id, step.output or "")]


def _unrun(action: Action) -> Item:
    call_id = action.call_id if isinstance(action, ToolCall) else ""
    return wire.function_call_output(call_id, turns.NOT_RUN)


@dataclass(slots=True)
class _Play:
    """One play while it runs: what it is played with, and what has come of it so far."""

    environment: Playable
    model: Model
    budget: Budget
    sampling: Mapping[str, Any]
    episode: Episode | None = None
    response: Item | None = None
    paid: float = 0.0
    turns: int = 0
    calls: int = 0
    stages: dict[str, float] = field(default_factory=dict)
    model_calls: list[float] = field(default_factory=list)

    @contextmanager
    def clocked(self, stage: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            spent = (time.perf_counter() - started) * 1e3
            self.stages[stage] = self.stages.get(stage, 0.0) + spent
            if stage == "model":
                self.model_calls.append(round(spent, 3))

    async def through(self, row: Row | Task, *, seed: int, id: str, repeat: int) -> Verdict:
        deadline = asyncio.get_running_loop().time() + self.budget.seconds
        with self.clocked("reset"):
            episode = await self.environment.reset(row, seed=seed, id=id, repeat=repeat, deadline=deadline)
        self.episode = episode
        try:
            while episode.transcript.ended is None:
                episode.transcript.ended = await self.turn(episode)
            with self.clocked("verify"):
                return await self.environment.verify(episode)
        finally:
            await self.close(episode)

    async def turn(self, episode: Episode) -> Ended | None:
        """Ask the model once and answer what it does; gives why the episode ended, if it did."""
        if self.turns >= self.budget.turns:
            return "turns"
        if episode.deadline is not None and asyncio.get_running_loop().time() >= episode.deadline:
            return "deadline"
        response = await self.ask(episode)
        if response is None:
            return "deadline"
        self.turns += 1
        self.response = response
        usage.note("policy", response)
        output: list[Item] = response["output"]
        if responses.is_incomplete(response):
            episode.transcript.items.extend(output)
            return "tokens"
        taken = await self.answer(episode, output)
        if taken is None:
            return "deadline"
        self.paid += taken.reward
        self.calls += taken.calls
        return taken.ended

    async def answer(self, episode: Episode, output: list[Item]) -> Taken | None:
        """Give what came of one turn, `None` where the deadline passed in a step that had hardly any time left."""
        started = time.perf_counter()
        with self.clocked("step"):
            try:
                return await take(self.environment, episode, output, calls_left=self.budget.tools - self.calls)
            except Failed as error:
                # The model spent the episode's time; the code that was asked last is not to blame.
                late = time.perf_counter() - started < SHORT * self.budget.seconds
                if error.kind in {"hook_timeout", "tool_timeout"} and late:
                    return None
                raise

    async def ask(self, episode: Episode) -> Item | None:
        """Give the model's response, `None` where the episode's deadline came first."""
        request = request_of(episode, self.sampling)
        with self.clocked("model"):
            try:
                async with asyncio.timeout_at(episode.deadline):
                    return await responses.asked(self.model, request, episode=episode)
            except TimeoutError:
                return None
            except EpisodeError as error:
                error.stage = "model"
                raise

    async def close(self, episode: Episode) -> None:
        with self.clocked("close"):
            try:
                await self.environment.close(episode)
            except EpisodeError as error:
                # The verdict stands: what was graded does not change because the cleaning up failed.
                log.warning("episode %s: %s", episode.id, error)

    def rollout(
        self,
        row: Row,
        *,
        id: str,
        seed: int,
        repeat: int,
        used: usage.Ledger,
        ending: Verdict | EpisodeError,
    ) -> Rollout:
        episode, verdict = self.episode, ending if isinstance(ending, Verdict) else None
        transcript = episode.transcript if episode else Transcript()
        stages = {stage: round(spent, 3) for stage, spent in self.stages.items()}
        return Rollout(
            id=id,
            environment=self.environment.name,
            row=row,
            seed=seed,
            repeat=repeat,
            outcome=_outcome(ending),
            ended=transcript.ended,
            sampling=dict(self.sampling),
            opening=transcript.opening,
            tools=episode.tools if episode else [],
            response=self.whole_response(transcript, used),
            reward=None if verdict is None else verdict.reward + self.paid,
            components={} if verdict is None else _components(verdict, self.paid),
            verdict=verdict,
            failure=_failure(ending) if isinstance(ending, EpisodeError) else None,
            turns=self.turns,
            usage=dict(used),
            timing=Timing(total=round(sum(stages.values()), 3), stages=stages, model_calls=self.model_calls),
        )

    def whole_response(self, transcript: Transcript, used: usage.Ledger) -> Item | None:
        if self.response is None and transcript.ended is None:
            return None
        return (self.response or wire.response([], model="", status="incomplete")) | {
            "output": transcript.items,
            "usage": usage.body(used.get("policy", usage.Usage())),
        }


async def play(
    environment: Playable,
    model: Model,
    row: Row | Task,
    *,
    seed: int = 0,
    repeat: int = 0,
    id: str = "",
    budget: Budget | None = None,
    sampling: Mapping[str, Any] | None = None,
) -> Rollout:
    """Play one episode of *row* and give its rollout: scored, unscorable or failed, never raised.

    *sampling* goes over the row's own `responses_create_params`. Raises `UsageError` where the row does not fit the
    environment; anything else that goes wrong is in the rollout's `failure`.
    """
    _not_names(environment, model)
    one = _Play(environment, model, budget or Budget(), sampling or {})
    with usage.counted() as used:
        try:
            ending: Verdict | EpisodeError = await one.through(row, seed=seed, id=id, repeat=repeat)
        except EpisodeError as error:
            ending = error
    raw = row.row() if isinstance(row, Task) else row
    return one.rollout(raw, id=id, seed=seed, repeat=repeat, used=used, ending=ending)


def _not_names(environment: object, model: object) -> None:
    if isinstance(environment, str):
        raise UsageError(f"play takes an environment, not its name; write gymsdk.load({environment!r})")
    if isinstance(model, str):
        raise UsageError(f"play takes a model, not its name; write gymsdk.model({model!r})")


def request_of(episode: Episode, sampling: Mapping[str, Any]) -> Item:
    """Give the Responses request for the episode's next turn: its history, its tools, the row's own parameters."""
    own = {key: value for key, value in episode.task.responses_create_params.items() if value is not None}
    own.pop("tools", None)
    history = [*episode.transcript.opening, *episode.transcript.items]
    tools = {"tools": episode.tools} if episode.tools else {}
    return {**own, **sampling, "input": history, **tools}


def _outcome(ending: Verdict | EpisodeError) -> Outcome:
    if isinstance(ending, Verdict):
        return "scored"
    return "unscorable" if isinstance(ending, Unscorable) else "failed"


def _components(verdict: Verdict, paid: float) -> dict[str, float]:
    if not paid:
        return dict(verdict.components)
    return (verdict.components or {"verdict": verdict.reward}) | {STEPS: paid}


def _failure(error: EpisodeError) -> Failure:
    return Failure(
        stage=error.stage or "",
        kind=error.kind,
        message=str(error),
        retryable=error.retryable,
        retry_after=error.retry_after,
    )
