"""Environments for TRL's own tool loop: `GRPOTrainer(environment_factory=…)`.

TRL generates, parses the tool calls, and calls methods of an object for each episode. The methods of this object are
the tools of the environment.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from gymsdk import responses
from gymsdk.environment import Environment
from gymsdk.episode import EpisodeRunner
from gymsdk.errors import EpisodeError, UsageError
from gymsdk.gym import slot
from gymsdk.gym.config import build_budget
from gymsdk.gym.env import close_on_finalize
from gymsdk.gym.spaces import build_response
from gymsdk.line import compute_seed
from gymsdk.plugins.registry import load
from gymsdk.trl.rollouts import NUMBER_KEY, build_prompt, read_rows
from gymsdk.trl.samples import describe_failure, report_failures
from gymsdk.types import Budget, Item, Rollout, Row

if TYPE_CHECKING:
    from datasets import Dataset

ENVIRONMENT_KEY = "environment"
"""The column of the dataset by which TRL chooses the factory of a row."""

RESERVED_NAMES = frozenset({"reset", "get_reward"})
"""Names of methods with a meaning for TRL."""

TYPES: Mapping[str, type] = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}
"""The Python type of each type of JSON schema."""

Completions: TypeAlias = Sequence[Sequence[Mapping[str, Any]]]


class ToolEpisode:
    """One episode after another, for one rollout of TRL. Subclasses have a method for each tool.

    Args:
        rows: The rows of the tasks.
    """

    def __init__(self, environment: Environment, rows: Sequence[Row], budget: Budget, seed: int) -> None:
        self._environment, self._rows, self._budget, self._seed = environment, rows, budget, seed
        self._runner: EpisodeRunner | None = None
        self._calls = 0

    def reset(self, **row: Any) -> str | None:
        """Open the episode of a row of the dataset; return the environment's messages after the row's prompt."""
        number: int = row[NUMBER_KEY]
        return slot.run(self._open(self._rows[number], number))

    async def _open(self, row: Row, number: int) -> str | None:
        await self._close()
        self._calls = 0
        self._runner = runner = EpisodeRunner(self._environment, self._budget)
        try:
            episode = await runner.open(row, seed=compute_seed(self._seed, self._environment.name, number))
        except EpisodeError as error:
            runner.result = error
            return None
        runner.pause_deadline()
        prompt = row["responses_create_params"]["input"]
        # TRL has shown the prompt of the row already.
        new_messages = episode.transcript.opening[1 if isinstance(prompt, str) else len(prompt) :]
        text = "\n\n".join(str(item["content"]) for item in new_messages if isinstance(item.get("content"), str))
        return f"\n\n{text}" if text else None

    def _call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Run a tool and return its output."""
        self._calls += 1
        call_id = f"call_{self._calls}"
        return slot.run(self._apply(responses.build_function_call(name, json.dumps(arguments), call_id)))

    async def _apply(self, item: Item) -> str:
        runner = self._runner
        if runner is None or runner.result is not None or runner.is_over:
            return "the episode is over"
        runner.restart_deadline()
        try:
            applied = await runner.apply_response(build_response([item]))
        except EpisodeError as error:
            error.stage = error.stage or "step"
            runner.result = error
            return f"the environment failed: {error}"
        finally:
            runner.pause_deadline()
        outputs = [item.get("output", item.get("content")) for item in applied.items]
        return "\n".join(output if isinstance(output, str) else json.dumps(output) for output in outputs)

    def _score(self, completion: Sequence[Mapping[str, Any]]) -> Rollout | None:
        """End the episode with the policy's last reply; return the rollout, `None` if no episode is open."""
        return slot.run(self._finish(_get_reply(completion)))

    async def _finish(self, reply: str | None) -> Rollout | None:
        runner = self._runner
        if runner is None or runner.episode is None:
            return None
        # Otherwise the completion ends with a tool call or its output, and the episode is graded as it is.
        if reply is not None:
            await self._apply(responses.build_message(reply))
        if runner.result is None:
            runner.restart_deadline()
            try:
                await runner.verify()
            except EpisodeError as error:
                runner.result = error
        rollout = runner.build_rollout()
        await self._close()
        return rollout

    async def _close(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.close()


class Environments(dict[str, Callable[[], ToolEpisode]]):
    """The factories for `environment_factory`, with the dataset and the reward function that belong to them.

    Build it with `gymsdk.trl.environment`. There is a factory for each set of tools that occurs in the rows: TRL shows
    the policy only the tools of a row's factory.

    Args:
        environment: The environment, which has been entered and is left when this object is dropped.
        rows: The rows of the tasks, complete with their tools.
        budget: The limits of an episode.
        seed: The seed of the episodes.

    Attributes:
        rows: The rows of the tasks.
    """

    def __init__(self, environment: Environment, rows: Sequence[Row], budget: Budget, seed: int) -> None:
        super().__init__()
        close_on_finalize(self, environment.__aexit__)
        self.rows = rows
        self._names: list[str] = []
        toolsets: dict[str, str] = {}
        for row in rows:
            tools: list[Item] = row["responses_create_params"].get("tools") or []
            key = json.dumps(tools, sort_keys=True)
            if key not in toolsets:
                toolsets[key] = environment.name if not toolsets else f"{environment.name}_{len(toolsets) + 1}"
                episode_class = build_class(environment.name, tools)
                self[toolsets[key]] = partial(episode_class, environment, rows, budget, seed)
            self._names.append(toolsets[key])

    @property
    def dataset(self) -> Dataset:
        """A dataset with the prompt, the number and the factory of each task, for `train_dataset`."""
        from datasets import Dataset

        return Dataset.from_list(
            [
                {"prompt": build_prompt(row, number), NUMBER_KEY: number, ENVIRONMENT_KEY: name}
                for number, (row, name) in enumerate(zip(self.rows, self._names, strict=True))
            ]
        )

    def reward(
        self,
        completions: Completions,
        environments: Sequence[ToolEpisode],
        log_metric: Callable[[str, float], None] | None = None,
        **_: Any,
    ) -> list[float | None]:
        """Return the environment's rewards, `None` for failed episodes; pass this method as `reward_funcs`.

        Args:
            completions: The messages of each completion; the last reply of the policy ends its episode.
            environments: The object of each episode.
            log_metric: TRL's function that logs a number.

        Raises:
            GymsdkError: All episodes failed.
        """
        rollouts = [
            environment._score(completion)  # noqa: SLF001  # public methods would be tools
            for environment, completion in zip(environments, completions, strict=True)
        ]
        report_failures(
            ["no episode was open" if rollout is None else describe_failure(rollout) for rollout in rollouts]
        )
        rewards = [None if rollout is None else rollout.reward for rollout in rollouts]
        if log_metric is not None:
            log_metric("failed_rollouts", sum(reward is None for reward in rewards) / max(1, len(rewards)))
        return rewards


def environment(
    environment: str | Environment,
    *,
    split: str | None = None,
    tasks: str | Path | Iterable[Row] | None = None,
    limit: int | None = 10_000,
    settings: Mapping[str, Any] | None = None,
    tools: int = 128,
    seconds: float = 600.0,
    seed: int = 0,
) -> Environments:
    """Return the factories for `GRPOTrainer(environment_factory=…)`.

    Args:
        environment: The environment: its name, or an `Environment`.
        split: The split of the tasks, by default `train`.
        tasks: The tasks instead of a split: a JSONL file, or rows.
        limit: The largest number of tasks; `None` for all, which a generated split may not end.
        settings: Settings of the environment.
        tools: The largest number of tool calls of an episode.
        seconds: The time limit of a stage of an episode.
        seed: The seed of the episodes; all episodes of a task open alike.

    Raises:
        UsageError: An argument is wrong, the environment has no such split, or a tool has a name that TRL reserves.
    """
    loaded = load(environment, **(settings or {})) if isinstance(environment, str) else environment
    rows = read_rows(loaded, split=split, tasks=tasks, limit=limit)
    # Each call is applied as a turn of its own, and the last reply is one more.
    budget = build_budget(turns=tools + 1, tools=tools, seconds=seconds)
    return Environments(loaded, slot.run(_complete_rows(loaded, rows, seed)), budget, seed)


def build_class(name: str, tools: Sequence[Item]) -> type[ToolEpisode]:
    """Return a subclass of `ToolEpisode` with a method for each of the *tools*.

    Raises:
        UsageError: A tool's name is reserved by TRL or is not a Python identifier.
    """
    methods = {tool["name"]: build_method(tool) for tool in tools}
    if wrong := sorted(method for method in methods if method in RESERVED_NAMES or method.startswith("_")):
        raise UsageError(f"TRL does not allow a tool with the name {wrong[0]!r}; use gymsdk.trl.rollout_func")
    class_name = "".join(part.capitalize() for part in name.replace("-", "_").split("_"))
    return type(class_name, (ToolEpisode,), dict(methods))


def build_method(tool: Item) -> Callable[..., str]:
    """Return a method that calls *tool*, with its name, its types and its description as a docstring.

    Args:
        tool: The tool's schema, as in the field `tools` of a row.
    """
    name: str = tool["name"]
    schema: Item = tool.get("parameters") or {}
    properties: dict[str, Item] = schema.get("properties") or {}
    annotations = {key: get_type(value) for key, value in properties.items()}

    def method(self: ToolEpisode, **arguments: Any) -> str:
        return self._call(name, arguments)

    # A strict schema requires every parameter; one that may be null is optional for the policy.
    optional = {key for key, value in properties.items() if _is_nullable(value)} | (
        set(properties) - set(schema.get("required", properties))
    )
    parameters = [
        inspect.Parameter(
            key,
            inspect.Parameter.KEYWORD_ONLY,
            default=None if key in optional else inspect.Parameter.empty,
            annotation=annotation,
        )
        for key, annotation in annotations.items()
    ]
    self_parameter = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    method.__signature__ = inspect.Signature([self_parameter, *parameters], return_annotation=str)  # type: ignore[attr-defined]
    method.__annotations__ = annotations | {"return": str}
    method.__name__, method.__qualname__ = name, f"ToolEpisode.{name}"
    lines = [f"    {key}: {' '.join(str(value.get('description', key)).split())}" for key, value in properties.items()]
    description = " ".join(str(tool.get("description") or name).split())
    method.__doc__ = "\n".join([description, *(["", "Args:", *lines] if lines else []), ""])
    return method


def get_type(schema: Item) -> Any:
    """Return the Python type for a JSON schema, as TRL and transformers read it from a function."""
    if "enum" in schema:
        return Literal[tuple(schema["enum"])]
    if options := schema.get("anyOf"):
        union = get_type(options[0])
        for option in options[1:]:
            union |= get_type(option)
        return union
    kind = schema.get("type")
    if isinstance(kind, list):
        return get_type({"anyOf": [{**schema, "type": type_name} for type_name in kind]})
    if kind == "array" and "items" in schema:
        return list[get_type(schema["items"])]  # type: ignore[misc]  # a type that is known at run time
    return TYPES.get(str(kind), Any)


def _is_nullable(schema: Item) -> bool:
    kinds = [schema.get("type"), *(option.get("type") for option in schema.get("anyOf") or ())]
    return "null" in kinds or any(isinstance(kind, list) and "null" in kind for kind in kinds)


async def _complete_rows(environment: Environment, rows: Sequence[Row], seed: int) -> list[Row]:
    """Enter the environment, and return the rows with the tools that each episode offers."""
    await environment.__aenter__()
    return [
        await environment.row(row, seed=compute_seed(seed, environment.name, number)) for number, row in enumerate(rows)
    ]


def _get_reply(completion: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the text of the policy's last message, `None` if the completion ends otherwise."""
    last = completion[-1] if completion else {}
    if last.get("role") != "assistant" or last.get("tool_calls"):
        return None
    content = last.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
