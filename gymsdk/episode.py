"""Play one episode: the loop between a model and an environment, and the verification of finished transcripts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from gymsdk.concurrency import timeout_at
from gymsdk.environment import Environment
from gymsdk.episode_record import EpisodeRecord
from gymsdk.errors import EpisodeError, Failed, Unscorable, UsageError
from gymsdk.plugins.results import add_rewards
from gymsdk.responses import (
    COLLECTED_USAGE,
    NO_USAGE,
    NOT_RUN_OUTPUT,
    UsageByRole,
    build_function_call_output,
    build_response,
    check_model,
    is_incomplete_response,
    iter_turn_spans,
    parse_actions,
    query_model,
    record_usage,
    usage_to_item,
)
from gymsdk.tools import truncate_output
from gymsdk.tracing import use_rollout_id
from gymsdk.types import (
    MAX_OUTPUT_CHARS,
    STEPS_COMPONENT,
    Action,
    Budget,
    EndReason,
    Episode,
    Failure,
    Item,
    Model,
    ModelCall,
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
    is_policy_item,
)

MIN_STEP_SHARE = 0.1
"""The share of an episode's seconds that a step must have had if a timeout is to count as the step's failure."""

DEFAULT_BUDGET = Budget()
"""The limits of an episode for which the caller gives none."""

RECORDED_RESPONSE_FIELDS = ("id", "model", "status", "incomplete_details", "usage")
"""The fields of a response that are recorded for each model call."""

log = logging.getLogger("gymsdk")


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
    """Play one episode.

    Args:
        environment: The environment.
        model: The policy.
        row: The row or task.
        seed: The environment's seed.
        repeat: The number of this play among the plays of its task, from 0.
        id: The rollout's id.
        budget: The limits of the episode.
        sampling: Request parameters that override the row's `responses_create_params`.

    Returns:
        The rollout: scored, unscorable or failed. Errors of the episode are in its `failure`.

    Raises:
        UsageError: The row does not fit the environment, or an argument has the wrong type.
    """
    _check_arguments(environment, model)
    runner = EpisodeRunner(environment, budget, sampling)
    with use_rollout_id(id):
        try:
            episode = await runner.open(row, seed=seed, id=id, repeat=repeat)
            while not runner.is_over:
                await _query_and_play_turn(runner, episode, model)
            await runner.verify()
        # Also an error of `reset`: a rollout that failed is a result, and no exception of `play`.
        except EpisodeError as error:
            runner.result = error
        finally:
            await runner.close()
    return runner.build_rollout()


def build_request(episode: Episode, sampling: Mapping[str, Any]) -> Item:
    """Return the Responses request for the episode's next turn.

    Args:
        episode: The episode.
        sampling: Request parameters that override the row's.
    """
    params = {key: value for key, value in episode.task.responses_create_params.items() if value is not None}
    # `reset` may offer other tools than the row.
    params.pop("tools", None)
    history = [*episode.transcript.opening, *episode.transcript.items]
    tools = {"tools": episode.tools} if episode.tools else {}
    return {**params, **sampling, "input": history, **tools}


def _check_arguments(environment: object, model: object) -> None:
    if isinstance(environment, str):
        raise UsageError(f"play takes an environment, not its name; write gymsdk.load({environment!r})")
    if isinstance(model, str):
        raise UsageError(f"play takes a model, not its name; write gymsdk.model({model!r})")
    check_model(model)


async def _query_and_play_turn(runner: EpisodeRunner, episode: Episode, model: Model) -> None:
    """Query the model and play its turn, or end the episode if its deadline has passed."""
    if episode.deadline is not None and asyncio.get_running_loop().time() >= episode.deadline:
        episode.transcript.ended = "deadline"
        return
    await runner.apply_response(await _query_model(runner, episode, model))


async def _query_model(runner: EpisodeRunner, episode: Episode, model: Model) -> Item:
    """Return the model's response.

    Raises:
        EpisodeError: The model failed, or did not respond before the episode's deadline (kind `model_timeout`). The
            policy did not use that time, so the episode has failed and is not verified as truncated.
    """
    request = build_request(episode, runner.sampling)
    with runner.time_stage("model"):
        try:
            with timeout_at(episode.deadline):
                return await query_model(model, request, episode=episode)
        except TimeoutError as error:
            raise Failed(
                f"the model did not answer before the episode's deadline of {runner.budget.seconds:g} s"
                f"{_format_last_attempt(error)}; check the model's server, allow more time (--deadline) or lower the"
                " load",
                kind="model_timeout",
                retryable=True,
                stage="model",
            ) from error
        except EpisodeError as error:
            error.stage = "model"
            raise


def _format_last_attempt(error: TimeoutError) -> str:
    """Return the last answer of the model's server, which the cancelled call added to its error as a note."""
    notes: list[str] = getattr(error.__cause__, "__notes__", [])
    return f" (the last attempt: {notes[-1]})" if notes else ""


# Turns


@dataclass(slots=True)
class TurnResult:
    """The result of one turn.

    Attributes:
        items: The items that the policy sees next.
        reward: The sum of the rewards of the turn's steps.
        calls: The number of tool calls that were run.
        ended: Why the turn ended the episode; `None` if the episode continues.
        runs: The tool calls and their timing.
    """

    items: list[Item] = field(default_factory=list)
    reward: float = 0.0
    calls: int = 0
    ended: EndReason | None = None
    runs: list[ToolRun] = field(default_factory=list)


PlayTurn: TypeAlias = Callable[[Episode, Item], Awaitable[TurnResult]]
"""The method `play_turn` of an environment that answers each turn of the policy as a whole, not its actions one by one.

It takes the episode and the model's response, and raises `EpisodeError` if the turn was not played. `EpisodeRunner`
adds the response and the result to the transcript.
"""


async def play_turn(
    environment: Playable,
    episode: Episode,
    output: Sequence[Item],
    result: TurnResult,
    *,
    calls_left: int = 128,
    max_output_chars: int = MAX_OUTPUT_CHARS,
) -> None:
    """Play the actions in *output*, one `step` each, in order.

    The calls after the end of the episode or of the tool budget are not run; their output is `NOT_RUN_OUTPUT`.
    If a step raises, *result* and the transcript keep the steps before it.

    Args:
        environment: The environment.
        episode: The episode.
        output: The policy's items.
        result: Receives the result of the turn.
        calls_left: The number of tool calls that the episode may still make.
        max_output_chars: The maximum length of one tool output.
    """
    messages: list[Item] = []
    actions = parse_actions(output, episode.transcript.items)
    # The engine reads its own ids, even if it repeats them.
    call_ids = [str(item.get("call_id", "")) for item in output if item.get("type") == "function_call"] or [""]
    episode.transcript.items.extend(output)
    try:
        for action, call_id in zip(actions, call_ids, strict=False):
            if result.ended or (isinstance(action, ToolCall) and result.calls >= calls_left):
                result.ended = result.ended or "tools"
                result.items.append(build_function_call_output(call_id, NOT_RUN_OUTPUT))
                result.runs += _record_tool_run(action, call_id, time.time(), answered=False)
                continue
            started, started_clock = time.time(), time.perf_counter()
            step = await environment.step(episode, action)
            milliseconds = (time.perf_counter() - started_clock) * 1e3
            result.runs += _record_tool_run(action, call_id, started, milliseconds=milliseconds)
            result.reward = add_rewards(result.reward, step.reward, "step")
            result.items.extend(_build_tool_output(action, call_id, step, max_output_chars))
            result.calls += isinstance(action, ToolCall)
            messages += [message.item() for message in step.messages]
            result.ended = "done" if step.done else None
    finally:
        result.items += messages
        episode.transcript.items.extend(result.items)
    if not actions:
        # A turn without an action would repeat the same request; reasoning models can do so for hours.
        result.ended = "done"
    episode.done = result.ended is not None


async def _play_whole_turn(
    play_whole: PlayTurn, episode: Episode, response: Item, calls_left: int, max_output_chars: int
) -> TurnResult:
    """Play a turn that the environment answers as a whole; the arguments are those of `play_turn`."""
    episode.transcript.items.extend(response["output"])
    result = await play_whole(episode, response)
    for item in result.items:
        if item.get("type") == "function_call_output":
            item["output"] = truncate_output(item["output"], max_output_chars)
    if result.ended is None and result.calls > calls_left:
        result.ended = "tools"
    elif result.ended is None and not response["output"] and is_incomplete_response(response):
        # The prompt fills the context: the next response would be empty, too.
        result.ended = "tokens"
    episode.transcript.items.extend(result.items)
    episode.paid = add_rewards(episode.paid, result.reward, "step")
    episode.record.step_rewards.append(result.reward)
    episode.done = result.ended is not None
    return result


def _build_tool_output(action: Action, call_id: str, step: Step, max_chars: int) -> list[Item]:
    if not isinstance(action, ToolCall):
        return []
    return [build_function_call_output(call_id, truncate_output(step.output or "", max_chars))]


def _record_tool_run(
    action: Action, call_id: str, started: float, *, milliseconds: float = 0.0, answered: bool = True
) -> list[ToolRun]:
    if not isinstance(action, ToolCall):
        return []
    return [ToolRun(call_id, action.name, started, round(milliseconds, 3), answered)]


# Episodes


@dataclass(slots=True)
class _OpenArguments:
    """The arguments of `EpisodeRunner.open`."""

    row: Row | Task
    id: str
    seed: int
    repeat: int


class StageTimer:
    """A context manager that measures its block and collects the token usage of the block.

    Args:
        usage: Receives the usage.
        milliseconds: The times by stage, to which the time of the block is added.
        stage: The name of the stage.
        durations: Receives the time of the block in milliseconds, if given.
    """

    __slots__ = ("_durations", "_milliseconds", "_stage", "_started", "_token", "_usage")

    def __init__(
        self, usage: UsageByRole, milliseconds: dict[str, float], stage: str, durations: list[float] | None = None
    ) -> None:
        self._usage = usage
        self._milliseconds = milliseconds
        self._stage = stage
        self._durations = durations

    def __enter__(self) -> None:
        self._token = COLLECTED_USAGE.set(self._usage)
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        milliseconds = (time.perf_counter() - self._started) * 1e3
        self._milliseconds[self._stage] = self._milliseconds.get(self._stage, 0.0) + milliseconds
        if self._durations is not None:
            self._durations.append(round(milliseconds, 3))
        COLLECTED_USAGE.reset(self._token)


class EpisodeRunner:
    """Runs one episode within a budget.

    Call `open`, then `apply_response` with the model's responses until `is_over`, then `verify`, `close` and
    `build_rollout`. A caller that catches an `EpisodeError` from one of these sets it as *result*.

    Args:
        environment: The environment.
        budget: The limits of the episode.
        sampling: Request parameters that override the row's.

    Attributes:
        episode: The episode, once it is open.
        result: The verdict, or the error that ended the episode.
        close_error: The error of `close`, if it failed.
        usage: Token usage by role.
    """

    def __init__(
        self, environment: Playable, budget: Budget | None = None, sampling: Mapping[str, Any] | None = None
    ) -> None:
        self.environment = environment
        self.budget = budget or DEFAULT_BUDGET
        self.sampling = dict(sampling or {})
        self.episode: Episode | None = None
        self.result: Verdict | EpisodeError | None = None
        self.close_error: EpisodeError | None = None
        self.usage: UsageByRole = {}
        self._arguments: _OpenArguments | None = None
        self._last_response: Item | None = None
        self._turns = 0
        self._tool_calls = 0
        self._stage_milliseconds: dict[str, float] = {}
        self._model_milliseconds: list[float] = []
        self._query_started: float | None = None
        self._started: float | None = None
        self._turn_times: list[tuple[float, float, float]] = []
        self._model_calls: list[ModelCall] = []

    @property
    def is_over(self) -> bool:
        """Whether the policy has no further turn."""
        return self.result is not None or (self.episode is not None and self.episode.transcript.ended is not None)

    def time_stage(self, stage: str) -> StageTimer:
        """Return a context manager that adds the time of its block to *stage*, and its token usage to the episode."""
        if stage != "model":
            return StageTimer(self.usage, self._stage_milliseconds, stage)
        self._query_started = time.time()
        return StageTimer(self.usage, self._stage_milliseconds, stage, self._model_milliseconds)

    async def open(self, row: Row | Task, *, seed: int = 0, id: str = "", repeat: int = 0) -> Episode:
        """Reset the environment.

        Args:
            row: The row or task.
            seed: The environment's seed.
            id: The rollout's id.
            repeat: The number of this play among the plays of its task, from 0.

        Raises:
            UsageError: The row does not fit the environment.
            EpisodeError: The reset failed.
        """
        self._arguments = _OpenArguments(row, id, seed, repeat)
        self._started = time.time()
        with self.time_stage("reset"):
            deadline = self._compute_deadline()
            self.episode = await self.environment.reset(row, seed=seed, id=id, repeat=repeat, deadline=deadline)
        return self.episode

    def restart_deadline(self) -> None:
        """Start the episode's seconds again: the time that an external policy takes is not the environment's."""
        if self.episode:
            self.episode.deadline = self._compute_deadline()

    def pause_deadline(self) -> None:
        """Stop the episode's seconds between two turns, while an external policy decides on its next turn."""
        if self.episode:
            self.episode.deadline = None

    def limit_turns(self, turns: int) -> None:
        """Lower the turn budget to *turns*; the episode is verified when it is used up."""
        self.budget = self.budget.model_copy(update={"turns": min(turns, self.budget.turns)})

    async def apply_response(self, response: Item) -> TurnResult:
        """Play the turn in the model's *response*; raises `EpisodeError` if a step fails."""
        episode = self._get_episode()
        self._turns += 1
        self._last_response = response
        first_index = len(episode.transcript.items)
        step_started = time.time()
        try:
            with self.time_stage("step"):
                record_usage("policy", response)
                result = await self._play_turn(episode, response)
        finally:
            self._record_turn_time(step_started)
        self._record_model_call(response, first_index, result)
        self._tool_calls += result.calls
        if result.ended is None and self._turns >= self.budget.turns:
            result.ended = "turns"
        episode.transcript.ended = result.ended
        return result

    async def verify(self) -> None:
        """Judge the transcript and set *result* to the verdict; raises `EpisodeError` if that fails."""
        with self.time_stage("verify"):
            self.result = await self.environment.verify(self._get_episode())

    async def close(self) -> None:
        """Close the episode, if it is open."""
        if self.episode is None:
            return
        with self.time_stage("close"):
            try:
                await self.environment.close(self.episode)
            except EpisodeError as error:
                # A failed cleanup does not change the verdict.
                log.warning("episode %s: %s", self.episode.id or "without an id", error)
                self.close_error = error

    def build_rollout(self) -> Rollout:
        """Return the rollout; *result* must be set."""
        assert self.result is not None, "the episode has a result"
        assert self._arguments is not None, "the episode was opened"
        episode, verdict = self.episode, self.result if isinstance(self.result, Verdict) else None
        transcript = episode.transcript if episode else Transcript()
        paid = episode.paid if episode else 0.0
        stages = {stage: round(milliseconds, 3) for stage, milliseconds in self._stage_milliseconds.items()}
        return Rollout(
            id=self._arguments.id,
            environment=self.environment.name,
            row=self._get_row(self._arguments.row),
            seed=self._arguments.seed,
            repeat=self._arguments.repeat,
            outcome="scored"
            if verdict is not None
            else "unscorable"
            if isinstance(self.result, Unscorable)
            else "failed",
            ended=transcript.ended,
            sampling=self.sampling,
            opening=transcript.opening,
            tools=episode.tools if episode else [],
            response=self._join_responses(transcript),
            reward=None if verdict is None else verdict.reward + paid,
            components={} if verdict is None else combine_components(verdict, paid),
            verdict=verdict,
            failure=_build_failure(self.result) if isinstance(self.result, EpisodeError) else None,
            turns=self._turns,
            usage=dict(self.usage),
            timing=Timing(
                total=round(sum(stages.values()), 3),
                stages=stages,
                model_calls=self._model_milliseconds,
                started=self._started,
                turns=self._turn_times,
            ),
            calls=self._model_calls,
            record=self._get_record(),
        )

    def _get_record(self) -> EpisodeRecord:
        """Return the record of the episode; that of an episode that did not open, or of a server's, is in the error."""
        error = self.result if isinstance(self.result, EpisodeError) else None
        if error is not None and error.record is not None:
            return error.record
        return EpisodeRecord() if self.episode is None else self.episode.record

    def _get_row(self, given: Row | Task) -> Row:
        """Return the *given* row or task as a row; the environment may have done this for the episode."""
        if self.episode is not None and self.episode.task is given:
            return self.episode.row
        return given.row() if isinstance(given, Task) else given

    def _record_turn_time(self, step_started: float) -> None:
        """Add the times of the turn whose step began at *step_started* and has just ended."""
        began = self._query_started or step_started
        start = _to_milliseconds(began - (self._started or began))
        model, step = _to_milliseconds(step_started - began), _to_milliseconds(time.time() - step_started)
        self._turn_times.append((start, model, step))

    def _record_model_call(self, response: Item, first_index: int, result: TurnResult) -> None:
        was_queried = self._query_started is not None and self._model_milliseconds
        self._model_calls.append(
            ModelCall(
                started=self._query_started or time.time(),
                milliseconds=self._model_milliseconds[-1] if was_queried else 0.0,
                response={key: response[key] for key in RECORDED_RESPONSE_FIELDS if key in response},
                first=first_index,
                count=len(response["output"]),
                tools=tuple(result.runs),
            )
        )
        self._query_started = None

    def _get_episode(self) -> Episode:
        assert self.episode is not None, "the episode was opened"
        return self.episode

    def _compute_deadline(self) -> float:
        return asyncio.get_running_loop().time() + self.budget.seconds

    async def _play_turn(self, episode: Episode, response: Item) -> TurnResult:
        """Play one turn; a step that times out because little time was left ends the episode with `deadline`."""
        output: list[Item] = response["output"]
        # `isinstance` with a protocol would take as long as the rest of a small environment's turn.
        play_whole: PlayTurn | None = getattr(episode.environment, "play_turn", None)
        if play_whole is not None:
            left = self.budget.tools - self._tool_calls
            return await _play_whole_turn(play_whole, episode, response, left, self.budget.output)
        if is_incomplete_response(response):
            episode.transcript.items.extend(output)
            return TurnResult(ended="tokens")
        result, started = TurnResult(), time.perf_counter()
        try:
            await play_turn(
                self.environment,
                episode,
                output,
                result,
                calls_left=self.budget.tools - self._tool_calls,
                max_output_chars=self.budget.output,
            )
        except Failed as error:
            # If the model used up the time, the step that ran last is not at fault.
            had_little_time = time.perf_counter() - started < MIN_STEP_SHARE * self.budget.seconds
            if error.kind not in {"hook_timeout", "tool_timeout"} or not had_little_time:
                raise
            result.ended = "deadline"
        return result

    def _join_responses(self, transcript: Transcript) -> Item | None:
        """Return the last response with all items of the episode and the policy's total usage."""
        if self._last_response is None and transcript.ended is None:
            return None
        return (self._last_response or build_response([], model="", status="incomplete")) | {
            "output": transcript.items,
            "usage": usage_to_item(self.usage.get("policy", NO_USAGE)),
        }


def _to_milliseconds(seconds: float) -> float:
    # The clock may have been set back meanwhile.
    return round(max(0.0, seconds) * 1e3, 3)


def combine_components(verdict: Verdict, paid: float) -> dict[str, float]:
    """Return the components of a reward: those of the *verdict*, and the rewards that the steps *paid*."""
    if not paid:
        return dict(verdict.components)
    return (verdict.components or {"verdict": verdict.reward}) | {STEPS_COMPONENT: paid}


def _build_failure(error: EpisodeError) -> Failure:
    return Failure(
        stage=error.stage or "",
        kind=error.kind,
        message=str(error),
        retryable=error.retryable,
        retry_after=error.retry_after,
    )


# Verification of finished transcripts


@dataclass(frozen=True, slots=True)
class JudgedEpisode:
    """The result of a verification.

    Attributes:
        verdict: The verdict.
        paid: The sum of the rewards of the steps.
        ended: Why the episode ended.
        record: The rewards of the steps, and the calls of judges and user models.
    """

    verdict: Verdict
    paid: float
    ended: EndReason
    record: EpisodeRecord = field(default_factory=EpisodeRecord)

    @property
    def reward(self) -> float:
        """The sum of the verdict's and the steps' rewards."""
        return self.verdict.reward + self.paid

    @property
    def components(self) -> dict[str, float]:
        """Named parts that sum to the reward."""
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
    """Open an episode of *row*, judge *items* as its transcript, and close it.

    If the verdict depends on more than the transcript, the actions are replayed first.

    Args:
        environment: The environment.
        row: The row.
        items: The items of the transcript.
        seed: The environment's seed.
        ended: Why the episode ended.
        seconds: The time limit of the replay.
        repeat: The number of the play among the plays of its task, from 0.
        opening: The items that the policy saw before its first turn, if known.

    Raises:
        BadRow: The row does not fit the environment.
        EpisodeError: The replay or the verification failed.
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
    """Judge *items* as the transcript of an open *episode* whose actions have been played."""
    episode.transcript.items = list(items)
    episode.transcript.ended = ended
    return JudgedEpisode(await environment.verify(episode), episode.paid, ended, episode.record)


def drop_unfinished_turn(items: Sequence[Item], ended: EndReason) -> Sequence[Item]:
    """Return *items* without a last turn that the model did not finish, because such a turn is not played."""
    if ended != "tokens" or not items or not is_policy_item(items[-1]):
        return items
    *_, last = iter_turn_spans(items)
    return items[: last.start]


async def _close_after_verify(environment: Environment, episode: Episode) -> None:
    try:
        await environment.close(episode)
    except EpisodeError as error:
        # A failed cleanup does not change the verdict.
        log.warning("an episode opened for verification: %s", error)
