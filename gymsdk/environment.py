"""An environment: a stack of plugins behind typed calls."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from gymsdk import complaints, tools
from gymsdk.deadlines import LONGEST, Deadline, from_now
from gymsdk.errors import (
    BadRow,
    BrokenEnvironment,
    BudgetSpent,
    Failed,
    GymsdkError,
    UnknownSplit,
    WorkerLost,
    suggestion,
)
from gymsdk.outcome import Rollout
from gymsdk.plugins import answers
from gymsdk.plugins.author import Author, stage
from gymsdk.plugins.configured import configured
from gymsdk.plugins.floor import Floor
from gymsdk.plugins.lifespan import Lifespan
from gymsdk.plugins.stack import Answerer, stack
from gymsdk.transcript import Action, Item, Message, ToolCall, Transcript
from gymsdk.turns import played, spans
from gymsdk.types import AGENT, Claims, Episode, Reset, Row, Step, Task, Verdict, agent_reference
from gymsdk.workers.threads import iterate_in_thread

GRADING = 120.0
"""Seconds `verify` may take, whatever is left of the episode; waiting for a worker or a judge does not count."""

CLOSING = 10.0
"""Seconds `close` may take."""


class Environment:
    """One environment: *plugin* (a module or an object with hooks) over the floor, with its *settings*.

    Use it as `async with environment:` where it has a `lifespan`. Raises `BrokenEnvironment` where the plugin is
    wrong, `BadConfig` where a setting is. Any episode method raises `EpisodeError` where the author's code fails.
    """

    def __init__(
        self, name: str, plugin: object, settings: Mapping[str, Any] | None = None, *, version: str = "0"
    ) -> None:
        self.name = name
        self.version = version
        self.plugin = plugin
        self._author = Author(name)
        self._floor = Floor(self._author.run, _data(plugin))
        self._stack = stack(name, plugin, self._floor)
        self.config = configured(name, self._stack.config_type, settings or {})
        self.tools = self._offered()
        self._floor.toolbox = self.tools
        begins = self._stack.implementations["lifespan"]
        self._lifespan = Lifespan(name, partial(self._at_once, begins[0]) if begins else None)

    def __repr__(self) -> str:
        return f"<Environment {self.name!r} {self.version}>"

    @property
    def task_type(self) -> type[Task]:
        """The row's schema."""
        return self._stack.task_type

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits it has tasks for."""
        return self._floor.list_splits() if self._stack.splits is None else self._stack.splits

    @property
    def needs_replay(self) -> bool:
        """Whether a verdict takes more than the transcript: the state, or what the author's steps paid."""
        return any("state" in each.parameter_names for each in self._stack.implementations["verify"]) or (
            not self._stack.implementations["step"][0].is_default
        )

    async def __aenter__(self) -> Self:
        await self._lifespan.enter()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._lifespan.exit()

    def read(self, row: Row | Task) -> Task:
        """Give *row* as this environment's task; raises `BadRow`."""
        if isinstance(row, self.task_type):
            return row
        try:
            return self.task_type.model_validate(row.row() if isinstance(row, Task) else row)
        except ValidationError as error:
            raise BadRow(f"the row does not fit environment {self.name!r}: {complaints.sentence(error)}") from None
        except complaints.INTERRUPTS:
            raise
        except BaseException as error:
            message = f"the row does not fit environment {self.name!r}: its schema raised"
            raise BadRow(f"{message} {complaints.raised(error)}") from error

    def tasks(self, split: str, *, seed: int = 0) -> Iterator[Task]:
        """Yield the tasks of *split*, lazily and perhaps without end; raises `UnknownSplit`.

        The author's code never runs inside a running event loop, so it may use `asyncio.run`: where this is called on
        one, it runs in a thread.
        """
        if split not in self.splits:
            known = ", ".join(self.splits) or "none"
            near = suggestion(str(split), self.splits, f"its splits: {known}")
            raise UnknownSplit(f"environment {self.name!r} has no split {split!r}{near}")
        drawn = partial(self._drawn, split, seed)
        return iterate_in_thread(drawn) if _on_a_loop() else drawn()

    async def reset(
        self, row: Row | Task, *, seed: int = 0, id: str = "", repeat: int = 0, deadline: float | None = None
    ) -> Episode:
        """Open an episode of *row*: state copied, opening messages and offered tools worked out."""
        self._lifespan.check_entered()
        task = self.read(row)
        raw = row if isinstance(row, dict) else task.row()
        async with stage("reset", _of_episode(deadline)):
            answer = answers.reset(await self._ask("reset", task=task, seed=seed))
            try:
                state, offered = answers.copied(answer.state), self._on_offer(task, answer)
            except Failed:
                await self._ask("close", task=task, state=answer.state)
                raise
        return Episode(
            id=id,
            seed=seed,
            task=task,
            row=raw,
            environment=self,
            state=state,
            transcript=Transcript(opening=[*deepcopy(task.input), *(message.item() for message in answer.messages)]),
            tools=offered,
            repeat=repeat,
            deadline=deadline,
        )

    async def step(self, episode: Episode, action: Action) -> Step:
        """Answer one tool call or reply; a call of a tool not on offer is answered, not run."""
        if isinstance(action, ToolCall):
            offered = {tool["name"]: tool for tool in episode.tools}
            if action.name not in offered:
                return Step(output=tools.refusal(tools.unknown(action.name, offered)))
        async with stage("step", _of_episode(episode.deadline)):
            given = {"state": episode.state, "action": action, "transcript": episode.transcript}
            step = answers.step(await self._ask("step", task=episode.task, **given), action)
            episode.paid = answers.total(episode.paid, step.reward, "step")
        return step

    async def verify(self, episode: Episode) -> Verdict:
        """Judge the transcript; raises `Unscorable` where the grader could not decide.

        A grader that spent its own budget on the answer gives 0; one that lost its worker is asked once more.
        """
        for last in (False, True):
            try:
                return await self._verdict(episode)
            except BudgetSpent:
                break
            except WorkerLost:
                if last:
                    raise
        return Verdict(reward=0.0, grader_timeout=True)

    async def close(self, episode: Episode) -> None:
        """Release what `reset` took, within `CLOSING` seconds."""
        async with stage("close", Deadline(from_now(CLOSING))):
            await self._ask("close", task=episode.task, state=episode.state)

    async def replay(
        self, row: Row | Task, items: Sequence[Item], *, seed: int = 0, deadline: float | None = None
    ) -> Episode:
        """Give the episode that ends where *items* do, its state rebuilt by playing their actions again."""
        episode = await self.reset(row, seed=seed, deadline=deadline)
        try:
            await self.replay_into(episode, items)
        except BaseException:
            await self.close(episode)
            raise
        return episode

    async def replay_into(self, episode: Episode, items: Sequence[Item], *, calls: bool = True) -> None:
        """Have *episode* end where *items* do, their actions played; without *calls*, those have been before."""
        for span in spans(items):
            episode.transcript.items = list(items[: span.stop])
            for action in played(items, span):
                if not episode.done and (calls or isinstance(action, Message)):
                    episode.done = (await self.step(episode, action)).done
        episode.transcript.items = list(items)

    async def solve(self, episode: Episode) -> list[Action] | None:
        """Give what a perfect policy does next, `None` where the environment does not say."""
        async with stage("solve", _of_episode(episode.deadline)):
            asked = {"state": episode.state, "transcript": episode.transcript}
            return answers.solution(await self._ask("solve", task=episode.task, **asked))

    async def claims(self, task: Task) -> Claims:
        """Give what the environment claims of *task*."""
        async with stage("claims", Deadline(from_now(CLOSING))):
            return answers.expected(await self._ask("claims", task=task), Claims, "claims")

    @property
    def has_metrics(self) -> bool:
        """Whether a hook of the environment has figures of its own."""
        return bool(self._stack.implementations["metrics"])

    async def metrics(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Give the environment's own figures over scored *rollouts*."""
        figures: dict[str, float] = {}
        async with stage("metrics", Deadline(from_now(GRADING))):
            for each in self._stack.implementations["metrics"]:
                figures |= answers.figures(await self._answer(each, {"rollouts": rollouts}))
        return figures

    async def _verdict(self, episode: Episode) -> Verdict:
        async with stage("verify", Deadline(from_now(GRADING), pausable=True)):
            given = {"state": episode.state, "transcript": episode.transcript}
            verdict = answers.verdict(await self._ask("verify", task=episode.task, **given))
            answers.total(episode.paid, verdict.reward, "verify")
            return verdict

    async def row(self, task: Row | Task, *, seed: int = 0) -> Row:
        """Return *task* as the row that `gymsdk tasks` writes: complete for agents that know nothing else of it.

        To the task's own `row()` this adds the name of this environment's agent, and the tools that the episode offers,
        which only a reset can say. The environment must be entered.

        Args:
            task: A task, or a row.
            seed: The seed of the reset.

        Returns:
            A JSON object with `agent_ref`, and with `responses_create_params.tools` where the episode offers any.

        Raises:
            BadRow: The task does not fit the environment.
            EpisodeError: The episode cannot be opened.
        """
        own = self.read(task).row()
        row = {**own, "agent_ref": own.get("agent_ref") or agent_reference(self.name + AGENT)}
        params = row["responses_create_params"]
        if params.get("tools") or not self.tools:
            return row
        episode = await self.reset(row, seed=seed)
        await self.close(episode)
        return {**row, "responses_create_params": {**params, "tools": episode.tools}} if episode.tools else row

    def _drawn(self, split: str, seed: int) -> Iterator[Task]:
        answers = (self._at_once(each, split=split, seed=seed) for each in self._stack.implementations["tasks"])
        try:
            for row in next((rows for rows in answers if rows is not None), ()):
                yield self.read(row)
        except (GymsdkError, *complaints.INTERRUPTS):
            raise
        except BaseException as error:
            raise self._broken("tasks", error) from error

    def _broken(self, hook: str, error: BaseException) -> BrokenEnvironment:
        function = getattr(self.plugin, hook, None)
        raised = complaints.raised(error, function)
        return BrokenEnvironment(f"environment {self.name!r}: hook {hook!r} raised {raised}")

    def _offered(self) -> dict[str, tools.Tool]:
        try:
            return tools.toolbox(chain.from_iterable(map(self._listed, self._stack.implementations["tools"])))
        except TypeError as error:
            raise BrokenEnvironment(f"environment {self.name!r}: {error}") from None

    def _listed(self, each: Answerer) -> Iterable[Callable[..., Any]]:
        answer = self._at_once(each)
        if answer is None or isinstance(answer, Iterable):
            return answer or ()
        raise TypeError(f"hook 'tools' must answer a list of functions, not {type(answer).__name__}")

    def _on_offer(self, task: Task, answer: Reset) -> list[Item]:
        written: list[Item] | None = task.responses_create_params.get("tools")
        if written:
            return [tool for tool in written if isinstance(tool.get("name"), str)]
        names = list(self.tools) if answer.tools is None else answer.tools
        if missing := set(names) - self.tools.keys():
            named = ", ".join(sorted(missing))
            raise Failed(f"hook 'reset' offers tools the environment does not have: {named}", kind="bad_answer")
        return [self.tools[name].schema for name in names]

    def _at_once(self, each: Answerer, **given: Any) -> Any:
        asked = {name: {"config": getattr(self, "config", None), **given}[name] for name in each.parameter_names}
        try:
            return each.function(**asked)
        except (GymsdkError, *complaints.INTERRUPTS):
            raise
        except BaseException as error:
            raise self._broken(each.hook, error) from error

    async def _ask(self, hook: str, **given: Any) -> Any:
        given |= {"config": self.config, "shared": self._lifespan.shared}
        for each in self._stack.implementations[hook]:
            answer = await self._answer(each, given)
            if answer is not None:
                return answer
        return None

    async def _answer(self, each: Answerer, given: Mapping[str, Any]) -> Any:
        asked = {name: given[name] for name in each.parameter_names}
        if not each.is_default:
            return await self._author.run(f"hook {each.hook!r}", each.function, asked)
        answer = each.function(**asked)
        return await answer if inspect.isawaitable(answer) else answer


def _on_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _of_episode(deadline: float | None) -> Deadline:
    return Deadline(from_now(LONGEST) if deadline is None else deadline)


def _data(plugin: object) -> Path | None:
    home = inspect.getmodule(plugin if inspect.ismodule(plugin) else type(plugin))
    file = getattr(home, "__file__", None)
    path = Path(file).parent / "data" if file else None
    return path if path and path.is_dir() else None
