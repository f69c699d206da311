"""The plugin stack of one environment: the author's plugin above the default plugin, checked when it is loaded."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, get_args, get_origin

import pluggy

from gymsdk.errors import BrokenEnvironment, format_suggestion
from gymsdk.plugins import hooks
from gymsdk.tools import get_parameters, resolve_annotation
from gymsdk.types import Config, Task

HOOKS = {
    name: tuple(get_parameters(value))
    for name, value in vars(hooks).items()
    if inspect.isfunction(value) and hasattr(value, "gymsdk_spec")
}
"""The parameters of every hook, by the hook's name."""

SYNC_HOOKS = frozenset({"tools", "tasks", "lifespan"})
"""The hooks that the host calls outside the event loop; they cannot be `async def`."""


@dataclass(frozen=True, slots=True)
class HookImplementation:
    """One plugin's implementation of a hook.

    Attributes:
        hook: The hook's name.
        function: The function.
        parameter_names: The names of its parameters.
        is_default: Whether it belongs to the default plugin and may run on the event loop.
    """

    hook: str
    function: Callable[..., Any]
    parameter_names: tuple[str, ...]
    is_default: bool

    @property
    def is_async(self) -> bool:
        """Whether the function is an `async def`."""
        return inspect.iscoroutinefunction(self.function)


@dataclass(frozen=True, slots=True)
class PluginStack:
    """The hook implementations of one environment, and the types that the author's annotations declare.

    Attributes:
        implementations: The implementations of each hook, the author's first.
        task_type: The type of the tasks.
        config_type: The type of the settings.
        splits: The splits that the `tasks` hook declares; `None` without that hook.
    """

    implementations: dict[str, tuple[HookImplementation, ...]]
    task_type: type[Task]
    config_type: type[Config]
    splits: tuple[str, ...] | None


def build_stack(name: str, plugin: object, default_plugin: object) -> PluginStack:
    """Return the checked stack of one environment.

    Args:
        name: The environment's name.
        plugin: The author's plugin: a module or an object with hooks.
        default_plugin: The default plugin.

    Raises:
        BrokenEnvironment: The author's plugin is invalid.
    """
    marked = _find_marked_hooks(plugin)
    for attribute, (hook, function) in marked.items():
        _check_hook(name, attribute, hook, function)
    _check_unmarked(name, plugin, marked)
    _check_required(name, {hook for hook, _ in marked.values()})
    implementations = _register_plugins(name, plugin, default_plugin)
    return PluginStack(
        implementations=implementations,
        task_type=_resolve_declared_type(name, implementations, "task", Task),
        config_type=_resolve_declared_type(name, implementations, "config", Config),
        splits=_read_splits(name, implementations),
    )


def _find_marked_hooks(plugin: object) -> dict[str, tuple[str, Callable[..., Any]]]:
    """Return the hook's name and the function of every attribute that is decorated with `hookimpl`."""
    marked = {}
    for attribute in dir(plugin):
        function = getattr(plugin, attribute, None)
        options = getattr(function, "gymsdk_impl", None)
        if isinstance(options, dict) and callable(function):
            marked[attribute] = (options.get("specname") or attribute, function)
    return marked


def _check_hook(name: str, attribute: str, hook: str, function: Callable[..., Any]) -> None:
    where = f"environment {name!r}: hook {attribute!r}"
    if hook not in HOOKS:
        suggestion = format_suggestion(hook, HOOKS, f"the hooks are {', '.join(HOOKS)}")
        raise BrokenEnvironment(f"{where} does not exist{suggestion}")
    if not inspect.isroutine(function):
        raise BrokenEnvironment(f"{where} is a {type(function).__name__}; write it as a function")
    options = getattr(function, "gymsdk_impl", {})
    if options.get("wrapper") or options.get("hookwrapper"):
        raise BrokenEnvironment(f"{where} is a hook wrapper, which is not supported; write a plain hook")
    _check_sync_hook(where, hook, function)
    for parameter in get_parameters(function).values():
        if parameter.name not in HOOKS[hook]:
            suggestion = format_suggestion(parameter.name, HOOKS[hook], f"its parameters: {', '.join(HOOKS[hook])}")
            raise BrokenEnvironment(f"{where} has an unknown parameter {parameter.name!r}{suggestion}")
        if parameter.default is not parameter.empty:
            raise BrokenEnvironment(
                f"{where} has a default for {parameter.name!r}; remove it, the host fills the value"
            )


def _check_sync_hook(where: str, hook: str, function: Callable[..., Any]) -> None:
    if hook not in SYNC_HOOKS:
        return
    if hook == "lifespan" and inspect.isasyncgenfunction(function):
        raise BrokenEnvironment(f"{where} is a bare generator; put @asynccontextmanager below its @hookimpl")
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise BrokenEnvironment(f"{where} is called outside the event loop; write it as a plain `def`")


def _check_unmarked(name: str, plugin: object, marked: dict[str, tuple[str, Callable[..., Any]]]) -> None:
    """Reject a function of the author that has a hook's name but not the decorator: it would never be called."""
    module = getattr(plugin, "__name__", type(plugin).__module__)
    for hook in HOOKS:
        function = getattr(plugin, hook, None)
        if hook not in marked and inspect.isroutine(function) and getattr(function, "__module__", None) == module:
            raise BrokenEnvironment(f"environment {name!r}: hook {hook!r} is not decorated with @hookimpl; decorate it")


def _check_required(name: str, implemented: set[str]) -> None:
    if not implemented & {"verify", "step"}:
        raise BrokenEnvironment(f"environment {name!r} has neither `verify` nor a `step` with rewards; add one of them")


def _register_plugins(name: str, plugin: object, default_plugin: object) -> dict[str, tuple[HookImplementation, ...]]:
    manager = pluggy.PluginManager(hooks.PROJECT)
    manager.add_hookspecs(hooks)
    try:
        manager.register(default_plugin, "default")
        manager.register(plugin, name)
        manager.check_pending()
    except (pluggy.PluginValidationError, ValueError) as error:
        raise BrokenEnvironment(f"environment {name!r}: {error}") from error
    implementations = {}
    for hook in HOOKS:
        implementations[hook] = _order_implementations(
            [
                HookImplementation(hook, found.function, tuple(found.argnames), found.plugin is default_plugin)
                for found in reversed(getattr(manager.hook, hook).get_hookimpls())
            ]
        )
    return implementations


def _order_implementations(implementations: list[HookImplementation]) -> tuple[HookImplementation, ...]:
    """Put the author's implementations first; the default `verify` runs only if the author has none."""
    authored = tuple(implementation for implementation in implementations if not implementation.is_default)
    default = tuple(implementation for implementation in implementations if implementation.is_default)
    return authored if authored and authored[0].hook == "verify" else authored + default


def _collect_annotations(
    name: str, implementations: dict[str, tuple[HookImplementation, ...]], parameter: str
) -> dict[str, Any]:
    """Return the author's annotations of *parameter* by hook."""
    annotations = {}
    for implementation in chain.from_iterable(implementations.values()):
        if implementation.is_default or parameter not in implementation.parameter_names:
            continue
        try:
            annotation = resolve_annotation(implementation.function, parameter)
        except NameError as error:
            raise BrokenEnvironment(
                f"environment {name!r}: the annotation of {parameter!r} in hook {implementation.hook!r} cannot be"
                f" resolved at run time ({error}); import it outside `if TYPE_CHECKING`"
            ) from None
        if annotation is not None:
            annotations[implementation.hook] = annotation
    return annotations


def _resolve_declared_type(
    name: str, implementations: dict[str, tuple[HookImplementation, ...]], parameter: str, base: type[Any]
) -> type[Any]:
    """Return the most specific class with which the author annotates *parameter*, a subclass of *base*."""
    declared, declaring_hook = base, ""
    for hook, annotation in _collect_annotations(name, implementations, parameter).items():
        if not (isinstance(annotation, type) and issubclass(annotation, base)):
            raise BrokenEnvironment(
                f"environment {name!r}: {parameter!r} of hook {hook!r} must be annotated with a subclass of"
                f" gymsdk.{base.__name__}, not {annotation!r}"
            )
        if issubclass(annotation, declared):
            declared, declaring_hook = annotation, hook
        elif not issubclass(declared, annotation):
            raise BrokenEnvironment(
                f"environment {name!r}: hook {declaring_hook!r} annotates {parameter!r} with {declared.__name__}, hook"
                f" {hook!r} with {annotation.__name__}; annotate both with one class, or with a class and its subclass"
            )
    return declared


def _read_splits(name: str, implementations: dict[str, tuple[HookImplementation, ...]]) -> tuple[str, ...] | None:
    if all(implementation.is_default for implementation in implementations["tasks"]):
        return None
    annotation = _collect_annotations(name, {"tasks": implementations["tasks"]}, "split").get("tasks")
    if get_origin(annotation) is not Literal:
        raise BrokenEnvironment(
            f"environment {name!r}: annotate `split` in `tasks` with the names of its splits, as in"
            " Literal['train', 'test']"
        )
    return get_args(annotation)
