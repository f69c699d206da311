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

from gymsdk import context, responses, types
from gymsdk.environment import Environment
from gymsdk.errors import EpisodeError, Failed, Unscorable, UsageError
from gymsdk.plugins import calls as answers
from gymsdk.responses import is_policy_item, iter_turn_spans
from gymsdk.types import (
    Action,
    EndReason,
    Episode,
    Failure,
    Item,
    Model,
    ModelCall,
    Outcome,
    Playable,
    Rollout,
    Row,
    Step,
    Task,
    Timing,
    ToolCall,
    ToolRun,
    Transcript,
    Verdict,
)

MIN_STEP_SHARE = 0.1
"""The share of an episode's seconds that a step must have had to be blamed for the deadline."""

RECORDED_RESPONSE_FIELDS = frozenset({"id", "model", "status", "incomplete_details", "usage"})
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
    output: int = Field(default=responses.MAX_OUTPUT_CHARS, ge=1000, exclude=True)


@dataclass(slots=True)
class TurnResult:
    """What came of one turn: the items to show the policy next, what it paid, whether a budget or it ended."""

    items: list[Item] = field(default_factory=list)
    reward: float = 0.0
    calls: int = 0
    ended: EndReason | None = None
    runs: list[ToolRun] = field(default_factory=list)


async def play_turn(
    environment: Playable,
    episode: Episode,
    output: Sequence[Item],
    result: TurnResult,
    *,
    calls_left: int = 128,
    max_output_chars: int = responses.MAX_OUTPUT_CHARS,
) -> None:
    """Answer the actions in *output*, one `step` each, in order; what comes of it is *taken*, and on the transcript.

    After the episode is done, or the tool budget spent, a turn's remaining calls are answered `not run`. Where a step
    raises, what came before it stays. An output beyond the *longest* is cut.
    """
    messages: list[Item] = []
    episode.transcript.items.extend(output)
    acts = responses.parse_actions(output)
    try:
        for action in acts:
            if result.ended or (isinstance(action, ToolCall) and result.calls >= calls_left):
                result.ended = result.ended or "tools"
                result.items.append(_build_not_run_output(action))
                result.runs += _record_tool_run(action, time.time(), answered=False)
                continue
            began, started = time.time(), time.perf_counter()
            step = await environment.step(episode, action)
            result.runs += _record_tool_run(action, began, milliseconds=(time.perf_counter() - started) * 1e3)
            result.reward = answers.add_rewards(result.reward, step.reward, "step")
            result.items.extend(_build_tool_output(action, step, max_output_chars))
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


def _build_tool_output(action: Action, step: Step, longest: int) -> list[Item]:
    if not isinstance(action, ToolCall):
        return []
    return [responses.build_function_call_output(action.call_id, responses.truncate_output(step.output or "", longest))]


def _record_tool_run(
    action: Action, started: float, *, milliseconds: float = 0.0, answered: bool = True
) -> list[ToolRun]:
    if not isinstance(action, ToolCall):
        return []
    return [ToolRun(action.call_id, action.name, started, round(milliseconds, 3), answered)]


def _build_not_run_output(action: Action) -> Item:
    call_id = action.call_id if isinstance(action, ToolCall) else ""
    return responses.build_function_call_output(call_id, responses.NOT_RUN_OUTPUT)


class EpisodeRunner:
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
        self.usage: types.UsageByRole = {}
        self._opened: _OpenArguments | None = None
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
            with types.collect_usage(self.usage):
                yield
        finally:
            spent = (time.perf_counter() - started) * 1e3
            self._stages[stage] = self._stages.get(stage, 0.0) + spent
            if stage == "model":
                self._model_calls.append(round(spent, 3))

    async def open(self, row: Row | Task, *, seed: int = 0, id: str = "", repeat: int = 0) -> Episode:
        """Reset the environment; raises `EpisodeError`, and `UsageError` where the row does not fit."""
        self._opened = _OpenArguments(row.row() if isinstance(row, Task) else row, id, seed, repeat)
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

    async def apply_response(self, response: Item) -> TurnResult:
        """Give what came of the turn in *response*; what ended the episode is on its transcript."""
        episode = self._playing()
        self._turns += 1
        self._response = response
        first = len(episode.transcript.items)
        with self.time_stage("step"):
            types.record_usage("policy", response)
            taken = await self._taken(episode, response)
        self._observe(response, first, taken)
        self._paid = answers.add_rewards(self._paid, taken.reward, "step")
        self._calls += taken.calls
        if taken.ended is None and self._turns >= self.budget.turns:
            taken.ended = "turns"
        episode.transcript.ended = taken.ended
        return taken

    async def verify(self) -> None:
        """Have the transcript judged: the verdict is the *ending*. Raises `EpisodeError`."""
        with self.time_stage("verify"):
            verdict = await self.environment.verify(self._playing())
        answers.add_rewards(self._paid, verdict.reward, "verify")
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
            outcome=_classify_outcome(self.result),
            ended=transcript.ended,
            sampling=self.sampling,
            opening=transcript.opening,
            tools=episode.tools if episode else [],
            response=self._whole_response(transcript),
            reward=None if verdict is None else verdict.reward + self._paid,
            components={} if verdict is None else combine_components(verdict, self._paid),
            verdict=verdict,
            failure=_build_failure(self.result) if isinstance(self.result, EpisodeError) else None,
            turns=self._turns,
            usage=dict(self.usage),
            timing=Timing(total=round(sum(stages.values()), 3), stages=stages, model_calls=self._model_calls),
            calls=self._observed,
        )

    def _observe(self, response: Item, first: int, taken: TurnResult) -> None:
        """Keep what the rollout's response, which joins those of all turns, does not tell of one of them."""
        spent = self._model_calls[-1] if self._asked_at is not None and self._model_calls else 0.0
        about = {key: value for key, value in response.items() if key in RECORDED_RESPONSE_FIELDS}
        asked_at, self._asked_at = self._asked_at or time.time(), None
        count = len(response["output"])
        self._observed.append(ModelCall(asked_at, spent, about, first, count, tuple(taken.runs)))

    def _playing(self) -> Episode:
        assert self.episode is not None, "a sitting is opened first"
        return self.episode

    def _from_now(self) -> float:
        return asyncio.get_running_loop().time() + self.budget.seconds

    async def _taken(self, episode: Episode, response: Item) -> TurnResult:
        """Give what came of one turn; out of time where the deadline passed in a step that had hardly any left."""
        output: list[Item] = response["output"]
        if responses.is_incomplete_response(response):
            episode.transcript.items.extend(output)
            return TurnResult(ended="tokens")
        taken, started = TurnResult(), time.perf_counter()
        try:
            calls_left, longest = self.budget.tools - self._calls, self.budget.output
            await play_turn(self.environment, episode, output, taken, calls_left=calls_left, max_output_chars=longest)
        except Failed as error:
            # The model spent the episode's time; the code that was asked last is not to blame.
            late = time.perf_counter() - started < MIN_STEP_SHARE * self.budget.seconds
            if error.kind not in {"hook_timeout", "tool_timeout"} or not late:
                raise
            taken.ended = "deadline"
        return taken

    def _whole_response(self, transcript: Transcript) -> Item | None:
        if self._response is None and transcript.ended is None:
            return None
        return (self._response or responses.build_response([], model="", status="incomplete")) | {
            "output": transcript.items,
            "usage": types.usage_to_item(self.usage.get("policy", types.Usage())),
        }


@dataclass(frozen=True, slots=True)
class _OpenArguments:
    """What a sitting was opened with."""

    row: Row
    id: str
    seed: int
    repeat: int


def _classify_outcome(ending: Verdict | EpisodeError) -> Outcome:
    if isinstance(ending, Verdict):
        return "scored"
    return "unscorable" if isinstance(ending, Unscorable) else "failed"


def combine_components(verdict: Verdict, paid: float) -> dict[str, float]:
    """Give the parts of a reward: those of its *verdict*, and what the steps *paid*."""
    if not paid:
        return dict(verdict.components)
    return (verdict.components or {"verdict": verdict.reward}) | {answers.STEPS_COMPONENT: paid}


def _build_failure(error: EpisodeError) -> Failure:
    return Failure(
        stage=error.stage or "",
        kind=error.kind,
        message=str(error),
        retryable=error.retryable,
        retry_after=error.retry_after,
    )


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
    _check_arguments(environment, model)
    sitting = EpisodeRunner(environment, budget, sampling)
    with context.use_rollout_id(id):
        try:
            episode = await sitting.open(row, seed=seed, id=id, repeat=repeat)
            while not sitting.is_over:
                await _query_and_play_turn(sitting, episode, model)
            await sitting.verify()
        except EpisodeError as error:
            sitting.result = error
        finally:
            await sitting.close()
    return sitting.build_rollout()


async def _query_and_play_turn(sitting: EpisodeRunner, episode: Episode, model: Model) -> None:
    """Ask the model once and play its turn; end the episode as truncated if its deadline has passed."""
    if not _has_time(episode):
        episode.transcript.ended = "deadline"
        return
    await sitting.apply_response(await _query_model(sitting, episode, model))


def _has_time(episode: Episode) -> bool:
    return episode.deadline is None or asyncio.get_running_loop().time() < episode.deadline


async def _query_model(sitting: EpisodeRunner, episode: Episode, model: Model) -> Item:
    """Return the model's response.

    Raises:
        EpisodeError: The model failed, or did not answer before the episode's deadline (kind `model_timeout`). The
            policy did not spend that time, so the episode is not truncated and judged: it has failed.
    """
    request = build_request(episode, sitting.sampling)
    with sitting.time_stage("model"):
        try:
            async with asyncio.timeout_at(episode.deadline):
                return await responses.query_model(model, request, episode=episode)
        except TimeoutError as error:
            raise Failed(
                f"the model did not answer before the episode's deadline of {sitting.budget.seconds:g} s{_format_last_attempt(error)};"
                " check the model's server, allow more time (--deadline) or lower the load",
                kind="model_timeout",
                retryable=True,
                stage="model",
            ) from error
        except EpisodeError as error:
            error.stage = "model"
            raise


def _format_last_attempt(error: TimeoutError) -> str:
    """Return what the model's server answered last, which the interrupted call noted on its cancellation."""
    notes: list[str] = getattr(error.__cause__, "__notes__", [])
    return f" (the last attempt: {notes[-1]})" if notes else ""


def _check_arguments(environment: object, model: object) -> None:
    if isinstance(environment, str):
        raise UsageError(f"play takes an environment, not its name; write gymsdk.load({environment!r})")
    if isinstance(model, str):
        raise UsageError(f"play takes a model, not its name; write gymsdk.model({model!r})")
    responses.check_model(model)


def build_request(episode: Episode, sampling: Mapping[str, Any]) -> Item:
    """Give the Responses request for the episode's next turn: its history, its tools, the row's own parameters."""
    own = {key: value for key, value in episode.task.responses_create_params.items() if value is not None}
    own.pop("tools", None)
    history = [*episode.transcript.opening, *episode.transcript.items]
    tools = {"tools": episode.tools} if episode.tools else {}
    return {**own, **sampling, "input": history, **tools}


@dataclass(frozen=True, slots=True)
class JudgedEpisode:
    """A verdict, what the steps *paid* beside it, and how the episode that was judged *ended*."""

    verdict: Verdict
    paid: float
    ended: EndReason

    @property
    def reward(self) -> float:
        """The whole reward."""
        return self.verdict.reward + self.paid

    @property
    def components(self) -> dict[str, float]:
        """What adds up to it."""
        return combine_components(self.verdict, self.paid)

    @property
    def fields(self) -> Item:
        """The verdict's own fields as plain JSON."""
        return self.verdict.model_dump(mode="json", exclude={"reward", "components"})


async def verify_transcript(
    environment: Environment,
    row: Row,
    items: Sequence[Item],
    *,
    seed: int,
    ended: EndReason,
    seconds: float,
    repeat: int = 0,
    opening: list[Item] | None = None,
) -> JudgedEpisode:
    """Give the verdict on *items* as the episode of *row* that has *ended*: opened, judged and closed.

    Where the verdict takes more than the transcript, the actions are played again, within *seconds*. The policy was
    shown *opening*, where that is known. Raises `BadRow` where the row does not fit, else `EpisodeError`.
    """
    deadline = asyncio.get_running_loop().time() + seconds
    episode = await environment.reset(row, seed=seed, repeat=repeat, deadline=deadline)
    try:
        if opening is not None:
            episode.transcript.opening = opening
        if environment.needs_replay:
            await environment.replay_into(episode, drop_unfinished_turn(items, ended))
        return await verify_episode(environment, episode, items, ended)
    finally:
        await _close_after_verify(environment, episode)


async def verify_episode(
    environment: Environment, episode: Episode, items: Sequence[Item], ended: EndReason
) -> JudgedEpisode:
    """Give the verdict on *items* as what was said in *episode*, open and played as far as they go."""
    episode.transcript.items = list(items)
    episode.transcript.ended = ended
    return JudgedEpisode(await environment.verify(episode), episode.paid, ended)


def drop_unfinished_turn(items: Sequence[Item], ended: EndReason) -> Sequence[Item]:
    """Give *items* as far as they were played: a turn that the model did not finish is shown to nobody."""
    if ended != "tokens" or not items or not is_policy_item(items[-1]):
        return items
    *_, last = iter_turn_spans(items)
    return items[: last.start]


async def _close_after_verify(environment: Environment, episode: Episode) -> None:
    try:
        await environment.close(episode)
    except EpisodeError as error:
        # The verdict stands: what was graded does not change because the cleaning up failed.
        log.warning("an episode opened to be judged: %s", error)
