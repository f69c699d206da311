"""An environment: its plugins behind typed, bounded calls, and its settings."""

from __future__ import annotations

import asyncio
import inspect
import typing
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Self

from pydantic import SecretStr, ValidationError
from pydantic.fields import FieldInfo

from gymsdk import tools, tracing
from gymsdk.concurrency import INTERRUPTS, ThreadIterator
from gymsdk.config.show import is_secret
from gymsdk.credentials import MIN_DISTINCTIVE_CHARS, iter_secrets
from gymsdk.episode_record import EpisodeRecord, record_stage
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
    describe_exception,
    describe_value,
    format_name,
    format_suggestion,
    format_validation_error,
    list_setting_errors,
    redact_values,
)
from gymsdk.jsonl import copy_json, freeze_json
from gymsdk.models import registry
from gymsdk.models.registry import MeteredModel
from gymsdk.plugins.calls import DEFAULT_STAGE_SECONDS, Deadline, HookCaller, HookRunner, get_loop_time_after, run_stage
from gymsdk.plugins.lifespan import Lifespan
from gymsdk.plugins.results import (
    DefaultPlugin,
    add_rewards,
    check_metrics,
    check_reset,
    check_solution,
    check_step,
    check_type,
    check_verdict,
    copy_state,
)
from gymsdk.plugins.stack import HookImplementation, build_stack
from gymsdk.responses import generate_id, iter_played_turns
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

VERIFY_SECONDS = 120.0
"""Seconds that `verify` may take, independent of the episode's deadline.

The wait for a worker or a judge does not count. A plain function may use this much CPU time, whatever the clock says.
"""

CLOSE_SECONDS = 10.0
"""Seconds that `close` may take."""


class Environment:
    """One environment.

    Use it as `async with environment:` if it has a `lifespan`. The methods for episodes raise `EpisodeError` if the
    author's code fails.

    Args:
        name: The environment's name.
        plugin: A module or an object with hooks. Default implementations replace the hooks that it lacks.
        settings: The environment's settings.
        version: The version of the environment's package.

    Raises:
        BrokenEnvironment: The plugin is invalid.
        BadConfig: A setting is missing or wrong.
    """

    def __init__(
        self, name: str, plugin: object, settings: Mapping[str, Any] | None = None, *, version: str = "0"
    ) -> None:
        self.name = name
        self.version = version
        self.plugin = plugin
        runner = HookRunner(name)
        self._default_plugin = DefaultPlugin(runner.run, _find_data_directory(plugin))
        self._stack = build_stack(name, plugin, self._default_plugin)
        self.config = build_config(name, self._stack.config_type, settings or {})
        self.tools = self._collect_tools()
        self._default_plugin.toolbox = self.tools
        lifespans = self._stack.implementations["lifespan"]
        self._lifespan = Lifespan(name, partial(self._call_sync, lifespans[0]) if lifespans else None)
        self._hooks = HookCaller(runner, self._stack.implementations, self._lifespan)

    def __repr__(self) -> str:
        return f"<Environment {self.name!r} {self.version}>"

    @property
    def task_type(self) -> type[Task]:
        """The type of the environment's tasks."""
        return self._stack.task_type

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that the environment has tasks for."""
        return self._default_plugin.list_splits() if self._stack.splits is None else self._stack.splits

    @property
    def needs_replay(self) -> bool:
        """Whether a verdict depends on more than the transcript: on the state, or on rewards of the author's steps."""
        reads_state = any("state" in hook.parameter_names for hook in self._stack.implementations["verify"])
        return reads_state or not self._stack.implementations["step"][0].is_default

    @property
    def has_models(self) -> bool:
        """Whether a setting of the environment is a model, such as a judge."""
        return any(isinstance(value, Model) for _, value in self.config)

    @property
    def has_metrics(self) -> bool:
        """Whether the environment has a `metrics` hook."""
        return bool(self._stack.implementations["metrics"])

    async def __aenter__(self) -> Self:
        await self._lifespan.enter()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._lifespan.exit()

    # Tasks

    def read(self, row: Row | Task) -> Task:
        """Return *row* as a task of this environment.

        Raises:
            BadRow: The row does not fit the environment.
        """
        if isinstance(row, self.task_type):
            return row
        try:
            return self.task_type.model_validate(row.row() if isinstance(row, Task) else row)
        except ValidationError as error:
            reason = format_validation_error(error)
            raise BadRow(f"the row does not fit environment {self.name!r}: {reason}") from None
        except INTERRUPTS:
            raise
        except BaseException as error:
            reason = f"its schema raised {describe_exception(error)}"
            raise BadRow(f"the row does not fit environment {self.name!r}: {reason}") from error

    def tasks(self, split: str, *, seed: int = 0) -> Iterator[Task]:
        """Yield the tasks of *split*, lazily; there may be infinitely many.

        The author's code never runs inside a running event loop, so it may use `asyncio.run`: if the caller runs on an
        event loop, the code runs in a thread.

        Args:
            split: The split's name.
            seed: The seed for generated tasks.

        Raises:
            UnknownSplit: The environment has no such split.
            BadRow: A task does not fit the environment.
            BrokenEnvironment: The `tasks` hook raised.
        """
        if split not in self.splits:
            known = ", ".join(self.splits) or "none"
            suggestion = format_suggestion(str(split), self.splits, f"its splits: {known}")
            raise UnknownSplit(f"environment {self.name!r} has no split {split!r}{suggestion}")
        source = partial(self._iter_tasks, split, seed)
        return ThreadIterator(source) if _is_loop_running() else source()

    async def row(self, task: Row | Task, *, seed: int = 0) -> Row:
        """Return *task* as the row that `gymsdk tasks` writes, complete for agents that know only the row.

        To the task's own `row()` this adds the name of this environment's agent, and the tools that the episode offers,
        which only a reset determines. The environment must be entered.

        Args:
            task: A task, or a row.
            seed: The seed of the reset.

        Returns:
            A JSON object with `agent_ref`, and with `responses_create_params.tools` if the episode offers any.

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

    # Episodes

    async def reset(
        self, row: Row | Task, *, seed: int = 0, id: str = "", repeat: int = 0, deadline: float | None = None
    ) -> Episode:
        """Open an episode.

        Args:
            row: The row or task.
            seed: The seed of the environment.
            id: The episode's id.
            repeat: The number of this play among the plays of its task, from 0.
            deadline: When the episode must be over, as a time of the event loop's clock.

        Raises:
            BadRow: The row does not fit the environment.
            UsageError: The environment has a lifespan and was not entered.
            EpisodeError: The author's code failed.
        """
        if self._stack.implementations["lifespan"]:
            self._lifespan.check_entered()
        task = self.read(row)
        # Another server may have got the id from its client.
        episode_id = id or tracing.get_rollout_id() or generate_id("episode")
        record = EpisodeRecord()
        with record_stage("reset", record), run_stage("reset", _build_episode_deadline(deadline)):
            result = check_reset(
                await self._hooks.call("reset", config=self.config, task=task, seed=seed, episode_id=episode_id)
            )
            try:
                state, offered_tools = copy_state(result.state), self._select_tools(task, result)
            except Failed:
                # The hook may have acquired resources, and there is no episode yet that the caller could close.
                await self._hooks.call(
                    "close", config=self.config, task=task, state=result.state, episode_id=episode_id
                )
                raise
        return Episode(
            id=id,
            seed=seed,
            task=task,
            row=row if isinstance(row, dict) else task.row(),
            environment=self,
            state=state,
            transcript=Transcript(opening=[*copy_json(task.input), *(message.item() for message in result.messages)]),
            tools=offered_tools,
            repeat=repeat,
            deadline=deadline,
            episode_id=episode_id,
            record=record,
        )

    async def step(self, episode: Episode, action: Action) -> Step:
        """Respond to one tool call or reply.

        The output for a tool that is not offered, and for arguments that UTF-8 cannot express, is an error message.
        """
        if (refusal := _refuse_call(episode, action)) is not None:
            # A step, too: the recorded calls of models name the steps by their numbers.
            episode.record.step_rewards.append(0.0)
            return refusal
        with record_stage("step", episode.record), run_stage("step", _build_episode_deadline(episode.deadline)):
            result = await self._call_episode_hook("step", episode, action=action, transcript=episode.transcript)
            step = check_step(result, action)
            episode.paid = add_rewards(episode.paid, step.reward, "step")
            episode.record.step_rewards.append(step.reward)
        return step

    async def verify(self, episode: Episode) -> Verdict:
        """Judge the transcript.

        If the grader exceeds its own budget, the reward is 0. If it loses its worker, it runs once more.

        Raises:
            Unscorable: The grader could not decide.
            Failed: The grader failed.
        """
        for is_last_attempt in (False, True):
            try:
                return await self._verify_once(episode)
            except BudgetSpent:
                break
            except WorkerLost:
                if is_last_attempt:
                    raise
        return Verdict(reward=0.0, grader_timeout=True)

    async def close(self, episode: Episode) -> None:
        """Release what `reset` acquired, within `CLOSE_SECONDS`."""
        with record_stage("close", episode.record), run_stage("close", Deadline(get_loop_time_after(CLOSE_SECONDS))):
            await self._call_episode_hook("close", episode)

    async def replay(
        self, row: Row | Task, items: Sequence[Item], *, seed: int = 0, deadline: float | None = None
    ) -> Episode:
        """Open an episode and rebuild its state from the actions in *items*.

        Args:
            row: The row or task.
            items: The items of the transcript to replay.
            seed: The seed of the environment.
            deadline: When the replay must be over, as a time of the event loop's clock.

        Returns:
            An episode that ends where *items* end.
        """
        episode = await self.reset(row, seed=seed, deadline=deadline)
        try:
            await self.replay_into(episode, items)
        except BaseException:
            await self.close(episode)
            raise
        return episode

    async def replay_into(self, episode: Episode, items: Sequence[Item], *, calls: bool = True) -> None:
        """Play the actions in *items* in a new *episode*.

        Args:
            episode: The episode.
            items: The items of the transcript to replay.
            calls: Whether to play tool calls; `False` if the transcript of *episode* has those played already.
        """
        actions: list[Action] = []
        played = [action for _, turn in iter_played_turns(episode.transcript.items) for action in turn]
        try:
            for span, turn in iter_played_turns(items):
                if calls or any(isinstance(action, Message) for action in turn):
                    # Once for a turn, which may have thousands of calls.
                    episode.transcript.items = list(items[: span.stop])
                for action in turn:
                    actions.append(action)
                    if not episode.done and (calls or isinstance(action, Message)):
                        episode.done = (await self.step(episode, action)).done
                        played.append(action)
        finally:
            if not calls:
                # Also after a failed reply: its error has the record.
                _order_steps(episode.record, played, actions)
        episode.transcript.items = list(items)

    # Further hooks

    async def solve(self, episode: Episode) -> list[Action] | None:
        """Return the next turn of a perfect policy, `None` if the environment has no solution."""
        with run_stage("solve", _build_episode_deadline(episode.deadline)):
            return check_solution(await self._call_episode_hook("solve", episode, transcript=episode.transcript))

    async def claims(self, task: Task) -> Claims:
        """Return the properties of *task* that `gymsdk check` verifies."""
        with run_stage("claims", Deadline(get_loop_time_after(CLOSE_SECONDS))):
            return check_type(await self._hooks.call("claims", config=self.config, task=task), Claims, "claims")

    async def metrics(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Return the environment's own metrics over scored *rollouts*."""
        metrics: dict[str, float] = {}
        with run_stage("metrics", Deadline(get_loop_time_after(VERIFY_SECONDS))):
            for implementation in self._stack.implementations["metrics"]:
                metrics |= check_metrics(await self._hooks.call_implementation(implementation, {"rollouts": rollouts}))
        return metrics

    async def _verify_once(self, episode: Episode) -> Verdict:
        deadline = Deadline(get_loop_time_after(VERIFY_SECONDS), pausable=True)
        with record_stage("verify", episode.record), run_stage("verify", deadline):
            verdict = check_verdict(await self._call_episode_hook("verify", episode, transcript=episode.transcript))
            # Only as a check: two finite rewards may have an infinite sum, which JSON cannot express.
            add_rewards(episode.paid, verdict.reward, "verify")
            return verdict

    def _iter_tasks(self, split: str, seed: int) -> Iterator[Task]:
        results = (
            self._call_sync(implementation, split=split, seed=seed)
            for implementation in self._stack.implementations["tasks"]
        )
        try:
            for row in next((rows for rows in results if rows is not None), ()):
                yield self.read(row)
        except (GymsdkError, *INTERRUPTS):
            raise
        except BaseException as error:
            raise self._build_hook_error("tasks", error) from error

    def _collect_tools(self) -> dict[str, tools.Tool]:
        shared_type = object if self._stack.implementations["lifespan"] else tools.NothingShared
        try:
            functions = chain.from_iterable(map(self._list_tool_functions, self._stack.implementations["tools"]))
            return tools.build_toolbox(functions, shared_type)
        except TypeError as error:
            raise BrokenEnvironment(f"environment {self.name!r}: {error}") from None

    def _list_tool_functions(self, implementation: HookImplementation) -> Iterable[Callable[..., Any]]:
        result = self._call_sync(implementation)
        if result is None or isinstance(result, Iterable):
            return result or ()
        raise TypeError(f"hook 'tools' returned {type(result).__name__}, expected a list of functions")

    def _select_tools(self, task: Task, result: Reset) -> list[Item]:
        """Return the schemas that the episode offers: the row's, else those that `reset` names, else all."""
        row_tools: list[Item] | None = task.responses_create_params.get("tools")
        if row_tools:
            return [tool for tool in row_tools if isinstance(tool.get("name"), str)]
        names = list(self.tools) if result.tools is None else result.tools
        if missing := set(names) - self.tools.keys():
            listed = ", ".join(sorted(missing))
            raise Failed(f"hook 'reset' offers tools that the environment does not have: {listed}", kind="bad_answer")
        return [self.tools[name].schema for name in names]

    # Calls of hooks

    def _call_sync(self, implementation: HookImplementation, **values: Any) -> Any:
        """Call a hook outside the event loop."""
        available = {"config": getattr(self, "config", None), **values}
        arguments = {name: available[name] for name in implementation.parameter_names}
        try:
            return implementation.function(**arguments)
        except (GymsdkError, *INTERRUPTS):
            raise
        except BaseException as error:
            raise self._build_hook_error(implementation.hook, error) from error

    async def _call_episode_hook(self, hook: str, episode: Episode, **values: Any) -> Any:
        about = {"task": episode.task, "state": episode.state, "episode_id": episode.episode_id}
        return await self._hooks.call(hook, config=self.config, **about, **values)

    def _build_hook_error(self, hook: str, error: BaseException) -> BrokenEnvironment:
        reason = describe_exception(error, getattr(self.plugin, hook, None))
        return BrokenEnvironment(f"environment {self.name!r}: hook {hook!r} raised {reason}")


def _is_loop_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _refuse_call(episode: Episode, action: Action) -> Step | None:
    """Return the step for a call that no tool gets, `None` for other actions."""
    if not isinstance(action, ToolCall):
        return None
    offered = {tool["name"]: tool for tool in episode.tools}
    if action.name not in offered:
        return Step(output=tools.format_error_output(tools.format_unknown_tool(action.name, offered)))
    return Step(output=tools.format_error_output(tools.SURROGATE_MESSAGE)) if action.has_surrogates() else None


def _order_steps(record: EpisodeRecord, played: Sequence[Action], actions: Sequence[Action]) -> None:
    """Put the steps of a record, those of *played*, into the order of *actions*, as if all had been played in turn."""
    if not (any(record.step_rewards) or record.calls):
        return
    by_tool: defaultdict[str, deque[int]] = defaultdict(deque)
    by_content: defaultdict[tuple[str, Hashable], deque[int]] = defaultdict(deque)
    for index, action in enumerate(played):
        by_tool[_get_tool_name(action)].append(index)
        by_content[_get_tool_name(action), _get_content(action)].append(index)
    order: list[int | None] = []
    taken: set[int] = set()
    for action in actions:
        name = _get_tool_name(action)
        step = _take_first(by_content[name, _get_content(action)], taken)
        if step is None:
            # An agent may have added defaults to the arguments: then the first call that is left counts.
            step = _take_first(by_tool[name], taken)
        # The agent answered other calls itself, as `step` answers a call of a tool that is not offered.
        if step is not None or isinstance(action, ToolCall):
            order.append(step)
    record.order_steps(order)


def _take_first(steps: deque[int], taken: set[int]) -> int | None:
    """Take the first of *steps* that is not *taken*, and return it; `None` if all are."""
    while steps:
        if (step := steps.popleft()) not in taken:
            taken.add(step)
            return step
    return None


def _get_tool_name(action: Action) -> str:
    return action.name if isinstance(action, ToolCall) else ""


def _get_content(action: Action) -> Hashable:
    """Return the content by which an action differs from others of its tool; an agent may leave out nulls."""
    if isinstance(action, Message):
        return action.text
    try:
        return freeze_json({name: value for name, value in (action.parsed() or {}).items() if value is not None})
    except RecursionError:
        return action.arguments


def _build_episode_deadline(deadline: float | None) -> Deadline:
    return Deadline(get_loop_time_after(DEFAULT_STAGE_SECONDS) if deadline is None else deadline)


def _find_data_directory(plugin: object) -> Path | None:
    module = inspect.getmodule(plugin if inspect.ismodule(plugin) else type(plugin))
    file = getattr(module, "__file__", None)
    path = Path(file).parent / "data" if file else None
    return path if path and path.is_dir() else None


# Settings


def find_config_type(name: str, plugin: object) -> type[Config]:
    """Return the type of the settings of an environment, which may need some to be built.

    Raises:
        BrokenEnvironment: The plugin is invalid.
    """
    return build_stack(name, plugin, DefaultPlugin(HookRunner(name).run, None)).config_type


def build_config(name: str, kind: type[Config], settings: Mapping[str, Any]) -> Config:
    """Return the configuration of an environment.

    Args:
        name: The environment's name.
        kind: The type of the configuration.
        settings: The settings by name. A setting of type `Model` may be the name of a model.

    Raises:
        BadConfig: A setting is unknown, missing or wrong.
        BrokenEnvironment: The author's configuration class raised another error.
    """
    wrong = _find_unknown_settings(name, kind, settings)
    known = {key: value for key, value in settings.items() if key in kind.model_fields}
    models, model_errors = _build_models(name, kind, settings)
    wrong += model_errors
    try:
        config = kind.model_validate({**known, **models})
    except ValidationError as error:
        reported = {path[0] for one in wrong for path, _ in one.setting_errors}
        wrong += _convert_validation_error(name, kind, error, reported)
    except INTERRUPTS:
        raise
    except BaseException as error:
        if not wrong:
            reason = redact_values(describe_exception(error), settings)
            raise BrokenEnvironment(f"environment {name!r}: its config raised {reason}") from error
    if wrong:
        raise _set_setting_errors(wrong[0], [pair for error in wrong for pair in error.setting_errors])
    secrets = _list_secrets(config)
    for _, value in config:
        if isinstance(value, MeteredModel):
            value.secrets = secrets
    return config


def _list_secrets(config: Config) -> list[SecretStr]:
    """Return the values of the secret settings; a short text only looks secret by its name, as in `answer_key`."""
    named = (value for name, value in config if isinstance(value, str) and is_secret((name,)))
    return [
        *iter_secrets(config),
        *(SecretStr(value) for value in named if len(value) >= MIN_DISTINCTIVE_CHARS),
    ]


def is_model_field(field: FieldInfo) -> bool:
    """Return whether a config field is annotated with `Model`, alone or in a union."""
    return field.annotation is Model or Model in typing.get_args(field.annotation)


def _resolve_model(role: str, value: object) -> object:
    """Return the model that *value* names, with its usage counted under *role*; other values unchanged."""
    if isinstance(value, str) and value:
        value = registry.model(value)
    return MeteredModel(value, role=role) if isinstance(value, Model) and not isinstance(value, MeteredModel) else value


def _find_unknown_settings(name: str, kind: type[Config], settings: Mapping[str, Any]) -> list[UsageError]:
    """Return an error for each of *settings* that *kind* does not have."""
    known = f"its settings: {', '.join(kind.model_fields) or 'none'}"
    errors: list[UsageError] = []
    for key in settings:
        if key in kind.model_fields:
            continue
        shown, suggestion = format_name(key), format_suggestion(key, kind.model_fields, known)
        error = BadConfig(f"environment {name!r} has no setting {shown!r}{suggestion}")
        errors.append(_set_setting_errors(error, [((shown,), f"no setting of environment {name!r}{suggestion}")]))
    return errors


def _build_models(
    name: str, kind: type[Config], settings: Mapping[str, Any]
) -> tuple[dict[str, object], list[UsageError]]:
    """Return the models of the settings of *kind* that are models, and an error for each that names none."""
    models: dict[str, object] = {}
    errors: list[UsageError] = []
    for key, field in kind.model_fields.items():
        if is_model_field(field) and (key in settings or not field.is_required()):
            try:
                models[key] = _resolve_model(key, settings.get(key, field.get_default(call_default_factory=True)))
            except UsageError as error:
                errors.append(_locate_model_error(name, key, error))
    return models, errors


def _locate_model_error(name: str, role: str, error: UsageError) -> UsageError:
    """Return *error*, about the model of the setting *role*, with a message that names the setting."""
    located = _set_setting_errors(error, [((role,), str(error))])
    located.args = (f"environment {name!r}: setting {role!r} is wrong: {error}",)
    return located


def _convert_validation_error(
    name: str, kind: type[Config], error: ValidationError, reported: Collection[str]
) -> list[UsageError]:
    """Return the errors in settings that are not *reported* yet, as one error in a list; the list may be empty."""
    details = [
        (detail, path, message)
        for detail, (path, message) in zip(error.errors(), list_setting_errors(error), strict=True)
        if not path or path[0] not in reported
    ]
    if not details:
        return []
    message = "; ".join(
        _format_config_error(kind, detail, ".".join(path), message) for detail, path, message in details
    )
    errors = [(path, f"{message[:1].lower()}{message[1:]}") for _, path, message in details]
    return [_set_setting_errors(BadConfig(f"environment {name!r}: {message}"), errors)]


def _set_setting_errors(error: UsageError, errors: Sequence[tuple[tuple[str, ...], str]]) -> UsageError:
    error.setting_errors = tuple(errors)
    return error


def _format_config_error(kind: type[Config], detail: Mapping[str, Any], location: str, message: str) -> str:
    if detail["type"] == "missing":
        return f"setting {location!r} is required; give it with --set {location}={_get_example_value(kind, location)}"
    subject = f"setting {location!r} is wrong" if location else "its settings are wrong"
    value = "" if _is_secret_location(kind, detail["loc"]) else f" (got {describe_value(detail['input'])})"
    return f"{subject}: {message}{value}"


def _is_secret_location(kind: type[Config], location: tuple[int | str, ...]) -> bool:
    """Return whether the value at *location* may be or contain a secret, which no message may show."""
    if not location:
        return any(_is_secret_field(name, field) for name, field in kind.model_fields.items())
    field = kind.model_fields.get(str(location[0]))
    is_secret_key = any(is_secret((str(key),)) for key in location)
    return is_secret_key or (field is not None and _is_secret_field(str(location[0]), field))


def _is_secret_field(name: str, field: FieldInfo) -> bool:
    return "Secret" in str(field.annotation) or is_secret((name,))


def _get_example_value(kind: type[Config], name: str) -> str:
    field = kind.model_fields.get(name)
    return "PROVIDER/NAME" if field and is_model_field(field) else "VALUE"
