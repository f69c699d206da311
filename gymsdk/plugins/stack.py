"""The stack of plugins that answers for one environment: the author's on top, the floor beneath, checked at load."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

import pluggy

from gymsdk.annotations import annotation, parameters
from gymsdk.errors import BrokenEnvironment, suggestion
from gymsdk.plugins import hookspecs
from gymsdk.types import Config, Task

HOOKS = {
    name: tuple(parameters(value))
    for name, value in vars(hookspecs).items()
    if inspect.isfunction(value) and hasattr(value, "gymsdk_spec")
}
"""Every hook's name and the parameters it may ask for."""

ANSWERED_AT_ONCE = frozenset({"tools", "tasks", "lifespan"})
"""Hooks the host asks outside any event loop: they cannot be `async def`."""


@dataclass(frozen=True, slots=True)
class Answerer:
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
class Stack:
    """Who answers each hook, top first, and the shapes the author's annotations declare."""

    implementations: dict[str, tuple[Answerer, ...]]
    task_type: type[Task]
    config_type: type[Config]
    splits: tuple[str, ...] | None


def stack(name: str, plugin: object, floor: object) -> Stack:
    """Give the checked stack of *plugin* over *floor*; raises `BrokenEnvironment` naming what is wrong."""
    marked = _marked(plugin)
    for attribute, (hook, function) in marked.items():
        _check(name, attribute, hook, function)
    _check_unmarked(name, plugin, marked)
    _check_required(name, {hook for hook, _ in marked.values()})
    answerers = _registered(name, plugin, floor)
    return Stack(
        implementations=answerers,
        task_type=_declared(name, answerers, "task", Task),
        config_type=_declared(name, answerers, "config", Config),
        splits=_splits(name, answerers),
    )


def _marked(plugin: object) -> dict[str, tuple[str, Callable[..., Any]]]:
    found = {}
    for attribute in dir(plugin):
        function = getattr(plugin, attribute, None)
        options = getattr(function, "gymsdk_impl", None)
        if isinstance(options, dict) and callable(function):
            found[attribute] = (options.get("specname") or attribute, function)
    return found


def _check(name: str, attribute: str, hook: str, function: Callable[..., Any]) -> None:
    where = f"environment {name!r}: hook {attribute!r}"
    if hook not in HOOKS:
        near = suggestion(hook, HOOKS, f"the hooks are {', '.join(HOOKS)}")
        raise BrokenEnvironment(f"{where} does not exist{near}")
    if not inspect.isroutine(function):
        raise BrokenEnvironment(f"{where} is a {type(function).__name__}; write it as a function")
    options = getattr(function, "gymsdk_impl", {})
    if options.get("wrapper") or options.get("hookwrapper"):
        raise BrokenEnvironment(f"{where} is a wrapper; an environment answers a hook, it cannot wrap one")
    _check_at_once(where, hook, function)
    for parameter in parameters(function).values():
        if parameter.name not in HOOKS[hook]:
            allowed = ", ".join(HOOKS[hook])
            near = suggestion(parameter.name, HOOKS[hook], f"it may ask for {allowed}")
            raise BrokenEnvironment(f"{where} asks for {parameter.name!r}{near}")
        if parameter.default is not parameter.empty:
            raise BrokenEnvironment(f"{where} gives {parameter.name!r} a default; the host fills it, leave that out")


def _check_at_once(where: str, hook: str, function: Callable[..., Any]) -> None:
    if hook not in ANSWERED_AT_ONCE:
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


def _registered(name: str, plugin: object, floor: object) -> dict[str, tuple[Answerer, ...]]:
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
        hook: _ranked([Answerer(hook, each.function, tuple(each.argnames), each.plugin is floor) for each in found])
        for hook, found in callers.items()
    }


def _ranked(answerers: list[Answerer]) -> tuple[Answerer, ...]:
    """Give the author's first, whatever order they ask for; the floor judges only where the author never does."""
    theirs = tuple(each for each in answerers if not each.is_default)
    floor = tuple(each for each in answerers if each.is_default)
    return theirs if theirs and theirs[0].hook == "verify" else theirs + floor


def _annotations(name: str, answerers: dict[str, tuple[Answerer, ...]], parameter: str) -> dict[str, Any]:
    """Give what the author wrote on *parameter*, by hook."""
    found = {}
    for each in (one for ones in answerers.values() for one in ones if not one.is_default and parameter in one.parameter_names):
        try:
            written = annotation(each.function, parameter)
        except NameError as error:
            raise BrokenEnvironment(
                f"environment {name!r}: the annotation of {parameter!r} in hook {each.hook!r} names nothing at run"
                f" time ({error}); import it outside `if TYPE_CHECKING`"
            ) from None
        if written is not None:
            found[each.hook] = written
    return found


def _declared(name: str, answerers: dict[str, tuple[Answerer, ...]], parameter: str, base: type[Any]) -> type[Any]:
    declared, by = base, ""
    for hook, written in _annotations(name, answerers, parameter).items():
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


def _splits(name: str, answerers: dict[str, tuple[Answerer, ...]]) -> tuple[str, ...] | None:
    written = [each.function for each in answerers["tasks"] if not each.is_default]
    if not written:
        return None
    kind = _annotations(name, {"tasks": answerers["tasks"]}, "split").get("tasks")
    if get_origin(kind) is not Literal:
        raise BrokenEnvironment(
            f"environment {name!r}: annotate `split` in `tasks` with the splits it has, as in Literal['train', 'test']"
        )
    return get_args(kind)
