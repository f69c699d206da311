"""The stack of plugins that answers for one environment: the author's on top, the floor beneath, checked at load."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pluggy

from gymsdk import tools
from gymsdk.errors import INTERRUPTS, BrokenEnvironment, Failed, describe_exception, format_suggestion
from gymsdk.jsonl import read_rows
from gymsdk.plugins import hooks as hookspecs
from gymsdk.plugins.hooks import hookimpl
from gymsdk.tools import get_parameters, resolve_annotation
from gymsdk.types import Action, Claims, Config, Message, Reset, Row, State, Step, Task, Verdict

HOOKS = {
    name: tuple(get_parameters(value))
    for name, value in vars(hookspecs).items()
    if inspect.isfunction(value) and hasattr(value, "gymsdk_spec")
}
"""Every hook's name and the parameters it may ask for."""

SYNC_HOOKS = frozenset({"tools", "tasks", "lifespan"})
"""Hooks the host asks outside any event loop: they cannot be `async def`."""


@dataclass(frozen=True, slots=True)
class HookImplementation:
    """One plugin's implementation of a hook; *ours* says that it is the floor's and may run on the loop."""

    hook: str
    function: Callable[..., Any]
    parameter_names: tuple[str, ...]
    is_default: bool

    @property
    def is_async(self) -> bool:
        """Whether it is an `async def`."""
        return inspect.iscoroutinefunction(self.function)


@dataclass(frozen=True, slots=True)
class PluginStack:
    """Who answers each hook, top first, and the shapes the author's annotations declare."""

    implementations: dict[str, tuple[HookImplementation, ...]]
    task_type: type[Task]
    config_type: type[Config]
    splits: tuple[str, ...] | None


def build_stack(name: str, plugin: object, floor: object) -> PluginStack:
    """Give the checked stack of *plugin* over *floor*; raises `BrokenEnvironment` naming what is wrong."""
    marked = _find_marked_hooks(plugin)
    for attribute, (hook, function) in marked.items():
        _check_hook(name, attribute, hook, function)
    _check_unmarked(name, plugin, marked)
    _check_required(name, {hook for hook, _ in marked.values()})
    answerers = _register_plugins(name, plugin, floor)
    return PluginStack(
        implementations=answerers,
        task_type=_resolve_declared_type(name, answerers, "task", Task),
        config_type=_resolve_declared_type(name, answerers, "config", Config),
        splits=_read_splits(name, answerers),
    )


def _find_marked_hooks(plugin: object) -> dict[str, tuple[str, Callable[..., Any]]]:
    found = {}
    for attribute in dir(plugin):
        function = getattr(plugin, attribute, None)
        options = getattr(function, "gymsdk_impl", None)
        if isinstance(options, dict) and callable(function):
            found[attribute] = (options.get("specname") or attribute, function)
    return found


def _check_hook(name: str, attribute: str, hook: str, function: Callable[..., Any]) -> None:
    where = f"environment {name!r}: hook {attribute!r}"
    if hook not in HOOKS:
        near = format_suggestion(hook, HOOKS, f"the hooks are {', '.join(HOOKS)}")
        raise BrokenEnvironment(f"{where} does not exist{near}")
    if not inspect.isroutine(function):
        raise BrokenEnvironment(f"{where} is a {type(function).__name__}; write it as a function")
    options = getattr(function, "gymsdk_impl", {})
    if options.get("wrapper") or options.get("hookwrapper"):
        raise BrokenEnvironment(f"{where} is a wrapper; an environment answers a hook, it cannot wrap one")
    _check_sync_hook(where, hook, function)
    for parameter in get_parameters(function).values():
        if parameter.name not in HOOKS[hook]:
            allowed = ", ".join(HOOKS[hook])
            near = format_suggestion(parameter.name, HOOKS[hook], f"it may ask for {allowed}")
            raise BrokenEnvironment(f"{where} asks for {parameter.name!r}{near}")
        if parameter.default is not parameter.empty:
            raise BrokenEnvironment(f"{where} gives {parameter.name!r} a default; the host fills it, leave that out")


def _check_sync_hook(where: str, hook: str, function: Callable[..., Any]) -> None:
    if hook not in SYNC_HOOKS:
        return
    if hook == "lifespan" and inspect.isasyncgenfunction(function):
        raise BrokenEnvironment(f"{where} is a bare generator; put @asynccontextmanager beneath its @hookimpl")
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise BrokenEnvironment(f"{where} is asked outside the event loop; write it as a plain `def`")


def _check_unmarked(name: str, plugin: object, marked: dict[str, tuple[str, Callable[..., Any]]]) -> None:
    """Refuse the author's own function that bears a hook's name: without its mark it would never be asked."""
    home = getattr(plugin, "__name__", type(plugin).__module__)
    for hook in HOOKS:
        function = getattr(plugin, hook, None)
        if hook not in marked and inspect.isroutine(function) and getattr(function, "__module__", None) == home:
            raise BrokenEnvironment(f"environment {name!r}: hook {hook!r} is there without @hookimpl; mark it")


def _check_required(name: str, hooks: set[str]) -> None:
    if not hooks & {"verify", "step"}:
        raise BrokenEnvironment(f"environment {name!r} has no `verify`, and no `step` that pays; add one of them")


def _register_plugins(name: str, plugin: object, floor: object) -> dict[str, tuple[HookImplementation, ...]]:
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    try:
        manager.register(floor, "floor")
        manager.register(plugin, name)
        manager.check_pending()
    except (pluggy.PluginValidationError, ValueError) as error:
        raise BrokenEnvironment(f"environment {name!r}: {error}") from error
    callers = {hook: getattr(manager.hook, hook).get_hookimpls()[::-1] for hook in HOOKS}
    return {
        hook: _order_implementations(
            [HookImplementation(hook, each.function, tuple(each.argnames), each.plugin is floor) for each in found]
        )
        for hook, found in callers.items()
    }


def _order_implementations(answerers: list[HookImplementation]) -> tuple[HookImplementation, ...]:
    """Give the author's first, whatever order they ask for; the floor judges only where the author never does."""
    theirs = tuple(each for each in answerers if not each.is_default)
    floor = tuple(each for each in answerers if each.is_default)
    return theirs if theirs and theirs[0].hook == "verify" else theirs + floor


def _collect_annotations(
    name: str, answerers: dict[str, tuple[HookImplementation, ...]], parameter: str
) -> dict[str, Any]:
    """Give what the author wrote on *parameter*, by hook."""
    found = {}
    for each in (
        one for ones in answerers.values() for one in ones if not one.is_default and parameter in one.parameter_names
    ):
        try:
            written = resolve_annotation(each.function, parameter)
        except NameError as error:
            raise BrokenEnvironment(
                f"environment {name!r}: the annotation of {parameter!r} in hook {each.hook!r} names nothing at run"
                f" time ({error}); import it outside `if TYPE_CHECKING`"
            ) from None
        if written is not None:
            found[each.hook] = written
    return found


def _resolve_declared_type(
    name: str, answerers: dict[str, tuple[HookImplementation, ...]], parameter: str, base: type[Any]
) -> type[Any]:
    declared, by = base, ""
    for hook, written in _collect_annotations(name, answerers, parameter).items():
        if not (isinstance(written, type) and issubclass(written, base)):
            raise BrokenEnvironment(
                f"environment {name!r}: {parameter!r} of hook {hook!r} must be annotated with a subclass of"
                f" gymsdk.{base.__name__}, not {written!r}"
            )
        if issubclass(written, declared):
            declared, by = written, hook
        elif not issubclass(declared, written):
            raise BrokenEnvironment(
                f"environment {name!r}: hook {by!r} annotates {parameter!r} with {declared.__name__}, hook {hook!r}"
                f" with {written.__name__}; annotate both with one class, or derive one class from the other"
            )
    return declared


def _read_splits(name: str, answerers: dict[str, tuple[HookImplementation, ...]]) -> tuple[str, ...] | None:
    written = [each.function for each in answerers["tasks"] if not each.is_default]
    if not written:
        return None
    kind = _collect_annotations(name, {"tasks": answerers["tasks"]}, "split").get("tasks")
    if get_origin(kind) is not Literal:
        raise BrokenEnvironment(
            f"environment {name!r}: annotate `split` in `tasks` with the splits it has, as in Literal['train', 'test']"
        )
    return get_args(kind)


RunFunction = Callable[[str, Callable[..., Any], dict[str, Any]], Awaitable[Any]]
"""Runs an author's function under its episode's deadline: what to call it in a message, the function, its arguments."""


class DefaultPlugin:
    """The built-in plugin beneath every environment.

    *toolbox* is filled once the author's `tools` have answered; *run* runs them; *data* is the package's folder
    of task files.
    """

    def __init__(self, run: RunFunction, data: Path | None) -> None:
        self.toolbox: Mapping[str, tools.Tool] = {}
        self._run = run
        self._data = data

    @hookimpl
    def reset(self) -> Reset:
        """Open with the row's own prompt, every tool on offer."""
        return Reset()

    @hookimpl
    async def step(self, task: Task, state: State, action: Action, config: Config, shared: Any) -> Step:
        """Run the tool of that name; end the episode on a plain reply."""
        if isinstance(action, Message):
            return Step(done=True)
        tool = self.toolbox.get(action.name)
        if tool is None:
            # A row may list tools of its own; that it is on offer was checked before.
            return Step(
                output=tools.format_error_output(f"The tool {action.name!r} cannot be run here; go on without it.")
            )
        try:
            arguments = tool.parse_arguments(action.arguments)
        except tools.InvalidArguments as error:
            return Step(output=tools.format_error_output(str(error)))
        except INTERRUPTS:
            raise
        except BaseException as error:
            message = (
                f"tool {action.name!r}: a validator of its arguments raised {describe_exception(error, tool.function)}"
            )
            raise Failed(message, kind="tool_raised") from error
        given = {"task": task, "state": state, "config": config, "shared": shared}
        asked = {name: given[name] for name in tool.host_parameters}
        value = await self._run(f"tool {action.name!r}", tool.function, {**arguments, **asked})
        try:
            return Step(output=tools.serialize_output(value))
        except TypeError as error:
            raise Failed(f"tool {action.name!r} {error}", kind="tool_bad_answer") from error

    @hookimpl
    def verify(self) -> Verdict:
        """Judge an episode paid by its steps: nothing is added."""
        return Verdict(reward=0.0)

    @hookimpl
    def claims(self) -> Claims:
        """Claim a best reward of 1 and nothing by chance."""
        return Claims()

    @hookimpl
    def tasks(self, split: str) -> Iterator[Row]:
        """Read the package's `data/<split>.jsonl`."""
        return (row for _, row in read_rows(self.get_task_file(split)))

    def get_task_file(self, split: str) -> Path:
        """Give where the package would keep *split*."""
        return (self._data or Path("data")) / f"{split}.jsonl"

    def list_splits(self) -> tuple[str, ...]:
        """Give the splits the package has files for."""
        return tuple(sorted(path.stem for path in self._data.glob("*.jsonl"))) if self._data else ()
