"""An environment: a stack of plugins behind typed calls."""

from __future__ import annotations

import asyncio
import inspect
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from gymsdk import errors, tools
from gymsdk.config.redaction import is_secret
from gymsdk.deadlines import DEFAULT_STAGE_SECONDS, Deadline, get_loop_time_after
from gymsdk.errors import (
    BadConfig,
    BadRow,
    BrokenEnvironment,
    BudgetSpent,
    Failed,
    GymsdkError,
    UnknownSplit,
    UsageError,
    WorkerLost,
    format_suggestion,
)
from gymsdk.models import registry
from gymsdk.models.registry import MeteredModel
from gymsdk.plugins import calls as answers
from gymsdk.plugins.calls import HookRunner, Lifespan, run_stage
from gymsdk.plugins.stack import DefaultPlugin, HookImplementation, build_stack
from gymsdk.responses import get_played_actions, iter_turn_spans
from gymsdk.threads import iterate_in_thread
from gymsdk.types import (
    AGENT_SUFFIX,
    Action,
    Claims,
    Config,
    Episode,
    Item,
    Message,
    Model,
    Reset,
    Rollout,
    Row,
    Step,
    Task,
    ToolCall,
    Transcript,
    Verdict,
    build_agent_reference,
)


def build_config(name: str, kind: type[Config], given: Mapping[str, Any]) -> Config:
    """Give environment *name*'s config; raises `BadConfig` naming the setting that is unknown, missing or wrong."""
    known = f"its settings: {', '.join(kind.model_fields) or 'none'}"
    unknown = {key: format_suggestion(key, kind.model_fields, known) for key in given if key not in kind.model_fields}
    if unknown:
        told = [f"environment {name!r} has no setting {key!r}{near}" for key, near in unknown.items()]
        about = [((key,), f"no setting of environment {name!r}{near}") for key, near in unknown.items()]
        raise _set_setting_errors(BadConfig(told[0]), about)
    models = {
        key: _resolve_model(key, given.get(key, field.get_default(call_default_factory=True)))
        for key, field in kind.model_fields.items()
        if is_model_field(field) and (key in given or not field.is_required())
    }
    try:
        return kind.model_validate({**given, **models})
    except ValidationError as error:
        wrong = [(tuple(map(str, each["loc"])), _format_detail(each)) for each in error.errors(include_input=False)]
        raise _set_setting_errors(
            BadConfig(f"environment {name!r}: {_format_config_errors(kind, error)}"), wrong
        ) from None
    except errors.INTERRUPTS:
        raise
    except BaseException as error:
        raise BrokenEnvironment(
            f"environment {name!r}: its config raised {errors.describe_exception(error)}"
        ) from error


def is_model_field(field: FieldInfo) -> bool:
    """Whether a config field is annotated with `Model`, alone or among others."""
    return field.annotation is Model or Model in typing.get_args(field.annotation)


def _resolve_model(role: str, value: object) -> object:
    if isinstance(value, str) and value:
        try:
            value = registry.model(value)
        except UsageError as error:
            _set_setting_errors(error, [((role,), str(error))])
            raise
    return MeteredModel(value, role=role) if isinstance(value, Model) and not isinstance(value, MeteredModel) else value


def _set_setting_errors(error: UsageError, sentences: Sequence[tuple[tuple[str, ...], str]]) -> UsageError:
    """Give *error* with a sentence for each setting it is about."""
    error.setting_errors = tuple(sentences)
    return error


def _format_detail(each: Mapping[str, Any]) -> str:
    words = errors.format_error_detail(each)
    return words[:1].lower() + words[1:]


def _format_config_errors(kind: type[Config], error: ValidationError) -> str:
    return "; ".join(_format_config_error(kind, each) for each in error.errors())


def _format_config_error(kind: type[Config], each: Mapping[str, Any]) -> str:
    where = errors.format_error_location(each)
    if each["type"] == "missing":
        return f"setting {where!r} is required; give it with --set {where}={_get_example_value(kind, where)}"
    about = f"setting {where!r} is wrong" if where else "its settings do not fit"
    got = "" if _is_secret_location(kind, each["loc"]) else f" (got {each['input']!r})"
    return f"{about}: {errors.format_error_detail(each)}{got}"


def _is_secret_location(kind: type[Config], way: tuple[int | str, ...]) -> bool:
    """Whether what *way* leads to may be a key: nobody is told it."""
    if not way:
        return any(_is_secret_field(name, field) for name, field in kind.model_fields.items())
    field = kind.model_fields.get(str(way[0]))
    return any(is_secret((str(key),)) for key in way) or (field is not None and _is_secret_field(str(way[0]), field))


def _is_secret_field(name: str, field: FieldInfo) -> bool:
    return "Secret" in str(field.annotation) or is_secret((name,))


def _get_example_value(kind: type[Config], where: str) -> str:
    field = kind.model_fields.get(where)
    return "PROVIDER/NAME" if field and is_model_field(field) else "VALUE"


VERIFY_SECONDS = 120.0
"""Seconds `verify` may take, whatever is left of the episode; waiting for a worker or a judge does not count."""

CLOSE_SECONDS = 10.0
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
        self._author = HookRunner(name)
        self._floor = DefaultPlugin(self._author.run, _find_data_directory(plugin))
        self._stack = build_stack(name, plugin, self._floor)
        self.config = build_config(name, self._stack.config_type, settings or {})
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
            raise BadRow(
                f"the row does not fit environment {self.name!r}: {errors.format_validation_error(error)}"
            ) from None
        except errors.INTERRUPTS:
            raise
        except BaseException as error:
            message = f"the row does not fit environment {self.name!r}: its schema raised"
            raise BadRow(f"{message} {errors.describe_exception(error)}") from error

    def tasks(self, split: str, *, seed: int = 0) -> Iterator[Task]:
        """Yield the tasks of *split*, lazily and perhaps without end; raises `UnknownSplit`.

        The author's code never runs inside a running event loop, so it may use `asyncio.run`: where this is called on
        one, it runs in a thread.
        """
        if split not in self.splits:
            known = ", ".join(self.splits) or "none"
            near = format_suggestion(str(split), self.splits, f"its splits: {known}")
            raise UnknownSplit(f"environment {self.name!r} has no split {split!r}{near}")
        drawn = partial(self._drawn, split, seed)
        return iterate_in_thread(drawn) if _is_loop_running() else drawn()

    async def reset(
        self, row: Row | Task, *, seed: int = 0, id: str = "", repeat: int = 0, deadline: float | None = None
    ) -> Episode:
        """Open an episode of *row*: state copied, opening messages and offered tools worked out."""
        self._lifespan.check_entered()
        task = self.read(row)
        raw = row if isinstance(row, dict) else task.row()
        async with run_stage("reset", _build_episode_deadline(deadline)):
            answer = answers.check_reset(await self._ask("reset", task=task, seed=seed))
            try:
                state, offered = answers.copy_state(answer.state), self._on_offer(task, answer)
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
                return Step(output=tools.format_error_output(tools.format_unknown_tool(action.name, offered)))
        async with run_stage("step", _build_episode_deadline(episode.deadline)):
            given = {"state": episode.state, "action": action, "transcript": episode.transcript}
            step = answers.check_step(await self._ask("step", task=episode.task, **given), action)
            episode.paid = answers.add_rewards(episode.paid, step.reward, "step")
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
        async with run_stage("close", Deadline(get_loop_time_after(CLOSE_SECONDS))):
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
        for span in iter_turn_spans(items):
            episode.transcript.items = list(items[: span.stop])
            for action in get_played_actions(items, span):
                if not episode.done and (calls or isinstance(action, Message)):
                    episode.done = (await self.step(episode, action)).done
        episode.transcript.items = list(items)

    async def solve(self, episode: Episode) -> list[Action] | None:
        """Give what a perfect policy does next, `None` where the environment does not say."""
        async with run_stage("solve", _build_episode_deadline(episode.deadline)):
            asked = {"state": episode.state, "transcript": episode.transcript}
            return answers.check_solution(await self._ask("solve", task=episode.task, **asked))

    async def claims(self, task: Task) -> Claims:
        """Give what the environment claims of *task*."""
        async with run_stage("claims", Deadline(get_loop_time_after(CLOSE_SECONDS))):
            return answers.check_type(await self._ask("claims", task=task), Claims, "claims")

    @property
    def has_metrics(self) -> bool:
        """Whether a hook of the environment has figures of its own."""
        return bool(self._stack.implementations["metrics"])

    async def metrics(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Give the environment's own figures over scored *rollouts*."""
        figures: dict[str, float] = {}
        async with run_stage("metrics", Deadline(get_loop_time_after(VERIFY_SECONDS))):
            for each in self._stack.implementations["metrics"]:
                figures |= answers.check_metrics(await self._answer(each, {"rollouts": rollouts}))
        return figures

    async def _verdict(self, episode: Episode) -> Verdict:
        async with run_stage("verify", Deadline(get_loop_time_after(VERIFY_SECONDS), pausable=True)):
            given = {"state": episode.state, "transcript": episode.transcript}
            verdict = answers.check_verdict(await self._ask("verify", task=episode.task, **given))
            answers.add_rewards(episode.paid, verdict.reward, "verify")
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
        row = {**own, "agent_ref": own.get("agent_ref") or build_agent_reference(self.name + AGENT_SUFFIX)}
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
        except (GymsdkError, *errors.INTERRUPTS):
            raise
        except BaseException as error:
            raise self._broken("tasks", error) from error

    def _broken(self, hook: str, error: BaseException) -> BrokenEnvironment:
        function = getattr(self.plugin, hook, None)
        raised = errors.describe_exception(error, function)
        return BrokenEnvironment(f"environment {self.name!r}: hook {hook!r} raised {raised}")

    def _offered(self) -> dict[str, tools.Tool]:
        try:
            return tools.build_toolbox(chain.from_iterable(map(self._listed, self._stack.implementations["tools"])))
        except TypeError as error:
            raise BrokenEnvironment(f"environment {self.name!r}: {error}") from None

    def _listed(self, each: HookImplementation) -> Iterable[Callable[..., Any]]:
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

    def _at_once(self, each: HookImplementation, **given: Any) -> Any:
        asked = {name: {"config": getattr(self, "config", None), **given}[name] for name in each.parameter_names}
        try:
            return each.function(**asked)
        except (GymsdkError, *errors.INTERRUPTS):
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

    async def _answer(self, each: HookImplementation, given: Mapping[str, Any]) -> Any:
        asked = {name: given[name] for name in each.parameter_names}
        if not each.is_default:
            return await self._author.run(f"hook {each.hook!r}", each.function, asked)
        answer = each.function(**asked)
        return await answer if inspect.isawaitable(answer) else answer


def _is_loop_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _build_episode_deadline(deadline: float | None) -> Deadline:
    return Deadline(get_loop_time_after(DEFAULT_STAGE_SECONDS) if deadline is None else deadline)


def _find_data_directory(plugin: object) -> Path | None:
    home = inspect.getmodule(plugin if inspect.ismodule(plugin) else type(plugin))
    file = getattr(home, "__file__", None)
    path = Path(file).parent / "data" if file else None
    return path if path and path.is_dir() else None
