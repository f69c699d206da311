"""An environment: a stack of plugins behind typed calls."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import ValidationError

from gymsdk import tools
from gymsdk.author import Author, from_now, stage
from gymsdk.configured import configured
from gymsdk.errors import (
    BadRow,
    BrokenEnvironment,
    BudgetSpent,
    Failed,
    UnknownSplit,
    Unscorable,
    WorkerLost,
    suggestion,
)
from gymsdk.outcome import Rollout
from gymsdk.plugins.floor import Floor
from gymsdk.plugins.stack import Answerer, stack
from gymsdk.turns import actions, turns
from gymsdk.types import (
    Action,
    Claims,
    Episode,
    Item,
    Message,
    Reset,
    Row,
    Step,
    Task,
    ToolCall,
    Transcript,
    Verdict,
)

GRADING = 120.0
"""Seconds `verify` may take, whatever is left of the episode."""

CLOSING = 10.0
"""Seconds `close` may take."""

T = TypeVar("T")


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
        self._open = AsyncExitStack()
        self._shared: Any = None
        self._floor = Floor(self._author.run, _data(plugin))
        self._stack = stack(name, plugin, self._floor)
        self.config = configured(name, self._stack.config, settings or {})
        self.tools = self._offered()
        self._floor.toolbox = self.tools

    def __repr__(self) -> str:
        return f"<Environment {self.name!r} {self.version}>"

    @property
    def task_type(self) -> type[Task]:
        """The row's schema."""
        return self._stack.task

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits it has tasks for."""
        return self._floor.splits() if self._stack.splits is None else self._stack.splits

    async def __aenter__(self) -> Self:
        for each in self._stack.answerers["lifespan"]:
            context: AbstractAsyncContextManager[Any] | None = self._at_once(each)
            if context is not None:
                self._shared = await self._open.enter_async_context(context)
                break
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()
        self._shared = None

    def read(self, row: Row | Task) -> Task:
        """Give *row* as this environment's task; raises `BadRow`."""
        if isinstance(row, self.task_type):
            return row
        try:
            return self.task_type.model_validate(row.row() if isinstance(row, Task) else row)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise BadRow(f"the row does not fit environment {self.name!r}: `{where}`: {first['msg']}") from None

    def tasks(self, split: str, *, seed: int = 0) -> Iterator[Task]:
        """Yield the tasks of *split*, lazily and perhaps without end; raises `UnknownSplit`."""
        if split not in self.splits:
            known = ", ".join(self.splits) or "none"
            near = suggestion(split, self.splits)
            raise UnknownSplit(f"environment {self.name!r} has no split {split!r}{near}; its splits: {known}")
        for each in self._stack.answerers["tasks"]:
            rows = self._at_once(each, split=split, seed=seed)
            if rows is not None:
                return (self.read(row) for row in rows)
        return iter(())

    async def reset(
        self, row: Row | Task, *, seed: int = 0, id: str = "", repeat: int = 0, deadline: float | None = None
    ) -> Episode:
        """Open an episode of *row*: state copied, opening messages and offered tools worked out."""
        task = self.read(row)
        raw = row if isinstance(row, dict) else task.row()
        async with stage("reset", deadline):
            answer = _expect(await self._ask("reset", task=task, seed=seed), Reset, "reset")
            opening = task.input + [message.item() for message in answer.messages]
            return Episode(
                id=id,
                seed=seed,
                task=task,
                row=raw,
                environment=self,
                state=answer.state.model_copy(deep=True),
                transcript=Transcript(opening=opening),
                tools=self._on_offer(task, answer),
                repeat=repeat,
                deadline=deadline,
            )

    async def step(self, episode: Episode, action: Action) -> Step:
        """Answer one tool call or reply; a call of a tool not on offer is answered, not run."""
        if isinstance(action, ToolCall):
            offered = {tool["name"]: tool for tool in episode.tools}
            if action.name not in offered:
                return Step(output=tools.refusal(tools.unknown(action.name, offered)))
        async with stage("step", episode.deadline):
            given = {"state": episode.state, "action": action, "transcript": episode.transcript}
            step = _expect(await self._ask("step", task=episode.task, **given), Step, "step")
            if not math.isfinite(step.reward):
                raise Failed(f"`step` paid {step.reward}, which is no finite reward", kind="bad_answer")
        return step

    async def verify(self, episode: Episode) -> Verdict:
        """Judge the transcript; raises `Unscorable` where the grader could not decide.

        A grader that spent its own budget on the answer gives 0; one that lost its worker is asked once more.
        """
        try:
            return await self._verdict(episode)
        except BudgetSpent:
            return Verdict(reward=0.0, grader_timeout=True)
        except WorkerLost:
            pass
        try:
            return await self._verdict(episode)
        except BudgetSpent:
            return Verdict(reward=0.0, grader_timeout=True)

    async def close(self, episode: Episode) -> None:
        """Release what `reset` took, within `CLOSING` seconds."""
        async with stage("close", from_now(CLOSING)):
            await self._ask("close", task=episode.task, state=episode.state)

    async def replay(self, row: Row | Task, items: Sequence[Item], *, seed: int = 0) -> Episode:
        """Give the episode that ends where *items* do, its state rebuilt by playing their actions again."""
        episode = await self.reset(row, seed=seed)
        for turn in turns(items):
            for action in actions(turn):
                if not episode.done:
                    episode.done = (await self.step(episode, action)).done
            episode.transcript.items.extend(turn)
        episode.transcript.items = list(items)
        return episode

    async def solve(self, episode: Episode) -> list[Action] | None:
        """Give what a perfect policy does next, `None` where the environment does not say."""
        async with stage("solve", episode.deadline):
            asked = {"state": episode.state, "transcript": episode.transcript}
            answer = await self._ask("solve", task=episode.task, **asked)
        if answer is None:
            return None
        return [answer] if isinstance(answer, Message) else [_expect(call, ToolCall, "solve") for call in answer]

    async def claims(self, task: Task) -> Claims:
        """Give what the environment claims of *task*."""
        async with stage("claims", from_now(CLOSING)):
            return _expect(await self._ask("claims", task=task), Claims, "claims")

    async def metrics(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Give the environment's own figures over scored *rollouts*."""
        figures: dict[str, float] = {}
        async with stage("metrics", from_now(GRADING)):
            for each in self._stack.answerers["metrics"]:
                figures |= await self._answer(each, {"rollouts": list(rollouts)}) or {}
        return figures

    async def _verdict(self, episode: Episode) -> Verdict:
        async with stage("verify", from_now(GRADING)):
            given = {"state": episode.state, "transcript": episode.transcript}
            verdict = _expect(await self._ask("verify", task=episode.task, **given), Verdict, "verify")
            if not math.isfinite(verdict.reward):
                raise Unscorable(f"the verdict's reward is {verdict.reward}", kind="not_finite")
            if verdict.components and not math.isclose(sum(verdict.components.values()), verdict.reward, abs_tol=1e-6):
                raise Failed(
                    f"the verdict's components sum to {sum(verdict.components.values()):g}, its reward is"
                    f" {verdict.reward:g}",
                    kind="bad_answer",
                )
        return verdict

    def _offered(self) -> dict[str, tools.Tool]:
        found: dict[str, tools.Tool] = {}
        for each in self._stack.answerers["tools"]:
            for function in self._at_once(each) or ():
                try:
                    made = tools.tool(function)
                except TypeError as error:
                    raise BrokenEnvironment(f"environment {self.name!r}: {error}") from None
                if made.name in found:
                    raise BrokenEnvironment(f"environment {self.name!r} offers two tools named {made.name!r}")
                found[made.name] = made
        return found

    def _on_offer(self, task: Task, answer: Reset) -> list[Item]:
        written: list[Item] | None = task.responses_create_params.get("tools")
        if written:
            return [tool for tool in written if isinstance(tool.get("name"), str)]
        names = list(self.tools) if answer.tools is None else answer.tools
        if missing := set(names) - self.tools.keys():
            raise Failed(f"`reset` offers tools the environment does not have: {sorted(missing)}", kind="bad_answer")
        return [self.tools[name].schema for name in names]

    def _at_once(self, each: Answerer, **given: Any) -> Any:
        asked = {name: {"config": getattr(self, "config", None), **given}[name] for name in each.asks}
        try:
            return each.function(**asked)
        except Exception as error:
            raise BrokenEnvironment(
                f"environment {self.name!r}: hook {each.hook!r} raised {type(error).__name__}: {error}"
            ) from error

    async def _ask(self, hook: str, **given: Any) -> Any:
        given |= {"config": self.config, "shared": self._shared}
        for each in self._stack.answerers[hook]:
            answer = await self._answer(each, given)
            if answer is not None:
                return answer
        return None

    async def _answer(self, each: Answerer, given: Mapping[str, Any]) -> Any:
        asked = {name: given[name] for name in each.asks}
        if not each.ours:
            return await self._author.run(f"hook {each.hook!r}", each.function, asked)
        answer = each.function(**asked)
        return await answer if inspect.isawaitable(answer) else answer


def _expect(answer: Any, kind: type[T] | tuple[type[T], ...], hook: str) -> T:
    if isinstance(answer, kind):
        return answer
    kinds = kind if isinstance(kind, tuple) else (kind,)
    wanted = " or ".join(each.__name__ for each in kinds)
    raise Failed(f"hook {hook!r} answered {type(answer).__name__}, not {wanted}", kind="bad_answer")


def _data(plugin: object) -> Path | None:
    home = inspect.getmodule(plugin if inspect.ismodule(plugin) else type(plugin))
    file = getattr(home, "__file__", None)
    path = Path(file).parent / "data" if file else None
    return path if path and path.is_dir() else None
