"""Play a script through an episode phase by phase and record the results of each phase, to compare two plays."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeAlias, TypeVar

from gymsdk import responses
from gymsdk.checks.subject import Plain, RecordingModel, Subject, to_plain
from gymsdk.environment import Environment
from gymsdk.episode import EpisodeRunner
from gymsdk.errors import BadRow, EpisodeError
from gymsdk.models.scripted import build
from gymsdk.types import Budget, Episode, Item, Playable, Rollout, Task, Verdict, extract_text, is_content

T = TypeVar("T")

GARBAGE_TURNS = (
    [responses.build_function_call("no_such_tool", "{}", "call_g0", id="fc_g0")],
    [responses.build_function_call("no_such_tool", "{not json", "call_g1", id="fc_g1")],
    [responses.build_message("I would rather not say. 0 1 2 3", id="msg_g2")],
)
"""Turns that a sensible policy would not play."""

Observations: TypeAlias = dict[str, Plain]
"""The result of each phase of an episode, as plain JSON."""


def sample_tasks(tasks: Sequence[T], max_tasks: int) -> list[T]:
    """Return *max_tasks* of *tasks*, evenly spaced."""
    count = min(max_tasks, len(tasks))
    return [tasks[number * len(tasks) // count] for number in range(count)]


def draw_tasks(environment: Environment, split: str, seed: int, count: int) -> list[Task]:
    """Return the first *count* tasks of *split*, or those before an unreadable row, which other checks report."""
    tasks: list[Task] = []
    try:
        tasks.extend(islice(environment.tasks(split, seed=seed), count))
    except BadRow:
        # `extend` keeps the tasks before the error.
        return tasks
    return tasks


def describe_task(task: Task) -> str:
    """Describe *task* by its id and the beginning of its prompt, or by its fields if it has no prompt."""
    fields = {key: value for key, value in task if key != "responses_create_params"}
    task_id = fields.get("id", fields.get("task_id"))
    # An environment may have emptied the row.
    items = task.input if "input" in task.responses_create_params else []
    prompt = " ".join(extract_text(item.get("content")) for item in items if is_content(item.get("content")))
    beginning = (
        shorten_text(" ".join(prompt.split()), 60) if prompt.strip() else shorten_text(repr(to_plain(fields)), 60)
    )
    return beginning if task_id is None else f"{to_plain(task_id)}: {beginning}"


def shorten_text(text: str, longest: int = 80) -> str:
    """Return the beginning of *text* in printable form."""
    beginning = text if len(text) <= longest else f"{text[:longest]}…"
    return ascii(beginning) if any(not sign.isprintable() and sign != "\n" for sign in beginning) else repr(beginning)


@dataclass(frozen=True, slots=True)
class Script:
    """The turns to play on a task; *name* says which policy they come from."""

    name: str
    task: Task
    seed: int
    turns: tuple[list[Item], ...]
    budget: Budget = field(default_factory=Budget)

    @property
    def title(self) -> str:
        """The policy and the task, for use in a sentence."""
        return f"{self.name} on {describe_task(self.task)}"


@dataclass(slots=True)
class Performance:
    """One play of a script.

    Attributes:
        observations: The result of each phase.
        answers: The items that answered each turn, or `None` for a turn that failed.
        is_closed: Whether the episode is closed.
    """

    script: Script
    environment: Playable
    observations: Observations = field(default_factory=dict)
    answers: list[list[Item] | None] = field(default_factory=list)
    is_closed: bool = False
    _runner: EpisodeRunner | None = None
    _turn: int = 0

    async def advance(self) -> str:
        """Play the next phase (`reset`, a turn, `verify` or `close`) and return its name."""
        if self._runner is None:
            self._runner = EpisodeRunner(self.environment, self.script.budget)
            return await self._run_phase("reset", self._reset(self._runner))
        runner = self._runner
        if self._has_next_turn(runner):
            self._turn += 1
            return await self._run_phase(f"turn {self._turn}", self._step(runner))
        if runner.result is None:
            return await self._run_phase("verify", self._verify(runner))
        await self.close()
        return "close"

    async def play_all(self) -> Observations:
        """Play the remaining phases and return the results of all phases."""
        try:
            while not self.is_closed:
                await self.advance()
        finally:
            await self.close()
        return self.observations

    async def play_until_verdict(self) -> Episode | None:
        """Play every turn. Return `None` if the episode failed before it could be judged."""
        while self._runner is None or self._has_next_turn(self._runner):
            await self.advance()
        return None if self._runner.result else self._runner.episode

    async def close(self) -> None:
        """Close the episode once."""
        if self._runner is not None and not self.is_closed:
            self.is_closed = True
            await self._runner.close()

    @property
    def has_ended(self) -> bool:
        """Whether the episode ended, by itself, by a budget or by a failure."""
        return self._runner is not None and self._runner.is_over

    @property
    def has_failed(self) -> bool:
        """Whether the episode failed."""
        return self._runner is not None and isinstance(self._runner.result, EpisodeError)

    @property
    def episode(self) -> Episode | None:
        """The episode, or `None` if it could not be opened."""
        return self._runner.episode if self._runner else None

    @property
    def rollout(self) -> Rollout:
        """The rollout of the finished episode."""
        assert self._runner is not None, "the performance has started"
        return self._runner.build_rollout()

    def _has_next_turn(self, runner: EpisodeRunner) -> bool:
        return not runner.is_over and self._turn < len(self.script.turns)

    async def _run_phase(self, name: str, phase: Awaitable[Plain]) -> str:
        try:
            self.observations[name] = await phase
        except EpisodeError as error:
            assert self._runner is not None, "a phase belongs to a run"
            # An error outside of a hook has no stage yet.
            error.stage = error.stage or name.partition(" ")[0].replace("turn", "step")
            self._runner.result = error
            self.observations[name] = {"failure": error.kind}
        return name

    async def _reset(self, runner: EpisodeRunner) -> Plain:
        episode = await runner.open(self.script.task, seed=self.script.seed)
        view = {"opening": episode.transcript.opening, "tools": episode.tools}
        return to_plain({**view, "state": episode.state})

    async def _step(self, runner: EpisodeRunner) -> Plain:
        # The entry stays `None` if the turn fails.
        self.answers.append(None)
        result = await runner.apply_response(
            responses.build_response(list(self.script.turns[self._turn - 1]), model="script")
        )
        self.answers[-1] = result.items
        after = runner.episode.state if runner.episode else None
        return to_plain({"answer": result.items, "reward": result.reward, "ended": result.ended, "state": after})

    async def _verify(self, runner: EpisodeRunner) -> Plain:
        await runner.verify()
        return {"verdict": serialize_verdict(runner.result)}


async def record_turns(subject: Subject, environment: Environment, task: Task, policy: str) -> Script | None:
    """Return the turns of the scripted *policy* on *task*, or `None` if it cannot play the task."""
    budget = subject.budget if policy == "oracle" else subject.brief_budget
    model = RecordingModel(build(policy))
    rollout = await subject.play(environment, model, task, budget=budget)
    if rollout.failure and rollout.failure.stage == "model":
        return None
    return Script(f"scripted/{policy}", task, subject.seed, tuple(model.turns), budget)


async def build_scripts(subject: Subject, environment: Environment, *, tasks: int) -> list[Script]:
    """Return the turns of the oracle and the random policy on a sample of *tasks*, and garbage on the first task."""
    chosen = sample_tasks(subject.tasks, tasks)
    recorded = [
        await record_turns(subject, environment, task, policy) for task in chosen for policy in ("oracle", "random")
    ]
    garbage = [Script("garbage", task, subject.seed, GARBAGE_TURNS, subject.brief_budget) for task in chosen[:1]]
    return [script for script in recorded if script is not None] + garbage


def serialize_verdict(verdict: object) -> Plain:
    """Return a verdict as plain JSON."""
    return to_plain(verdict) if isinstance(verdict, Verdict) else None
