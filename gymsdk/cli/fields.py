"""Build the options of a command from the pydantic models that its function takes."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Generic, Self, TypeVar, Union, get_args, get_origin, get_type_hints

import typer
from pydantic import AfterValidator, BaseModel
from pydantic.fields import FieldInfo

from gymsdk.settings import Flag

M = TypeVar("M", bound=BaseModel)


class Given(dict[str, Any], Generic[M]):
    """The values of a model's fields that the user has set, nested like the model; files may supply the others."""


class Only(tuple[str, ...]):
    """Marks a parameter with the fields that the command takes, in the order of their options."""

    __slots__ = ()

    def __new__(cls, *names: str) -> Self:
        """Name the fields."""
        return super().__new__(cls, names)


class Without(Only):
    """Marks a parameter with the fields that the command does not take."""

    __slots__ = ()


class Changed(dict[str, Mapping[str, Any]]):
    """Marks a parameter with attributes of `Flag` that differ in this command, by field."""


@dataclass(frozen=True, slots=True)
class Slot:
    """An option: the parameter of the function, the path of the field in its model, the field, and its flag."""

    owner: str
    path: tuple[str, ...]
    field: FieldInfo
    flag: Flag

    @property
    def name(self) -> str:
        """The name under which Typer passes the value."""
        names = self.flag.names or (f"--{self.path[-1]}",)
        first = next(name for name in names if name.startswith("--"))
        return first.partition("/")[0][2:].replace("-", "_")

    @property
    def option(self) -> str:
        """The name of the option."""
        return f"--{self.name.replace('_', '-')}"


def iter_slots(model: type[BaseModel], owner: str = "", path: tuple[str, ...] = ()) -> Iterator[Slot]:
    """Yield a slot for each field of *model*, and of the models in it, that has a flag."""
    for name, field in model.model_fields.items():
        flag = next((mark for mark in field.metadata if isinstance(mark, Flag)), None)
        inner = _strip(field.annotation)
        if flag is not None:
            yield Slot(owner, (*path, name), field, flag)
        elif isinstance(inner, type) and issubclass(inner, BaseModel) and inner is not model:
            yield from iter_slots(inner, owner, (*path, name))


def take_models(function: Callable[..., None]) -> Callable[..., None]:
    """Return *function* for Typer, with an option for each flagged field of the models that its parameters name.

    A parameter of type `Model` receives the validated model, a parameter of type `Given[Model]` the values that the
    user has set.
    `Only`, `Without` and `Changed` in its annotation choose and change the options.
    """
    parameters: dict[str, inspect.Parameter] = {}
    models: dict[str, tuple[type[BaseModel], bool]] = {}
    slots: list[Slot] = []
    hints = get_type_hints(function, include_extras=True)
    for parameter in inspect.signature(function).parameters.values():
        annotation = hints[parameter.name]
        taken = _find_model(annotation)
        if taken is None:
            parameters[parameter.name] = parameter.replace(annotation=annotation)
            continue
        models[parameter.name] = taken
        for slot in _choose_slots(taken[0], parameter.name, getattr(annotation, "__metadata__", ())):
            slots.append(slot)
            parameters[slot.name] = _build_parameter(slot)

    @wraps(function)
    def command(**values: Any) -> None:
        trees: dict[str, dict[str, Any]] = {owner: {} for owner in models}
        for slot in slots:
            _store(trees[slot.owner], slot, values.pop(slot.name))
        for owner, (model, is_given) in models.items():
            values[owner] = Given(trees[owner]) if is_given else model.model_validate(trees[owner])
        function(**values)

    # A signature must have the parameters by position before those by keyword.
    ordered = sorted(parameters.values(), key=lambda parameter: parameter.kind)
    # Typer reads the signature and the annotations of the function; `wraps` would lead it to those of *function*.
    command.__signature__ = inspect.Signature(ordered)  # type: ignore[attr-defined]  # functions accept it
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in ordered}
    del command.__wrapped__
    return command


def list_options(model: type[BaseModel], given: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the value of each option of *model* as the user wrote it; `None` for an option that is not set."""
    found: dict[str, str | None] = {}
    for slot in iter_slots(model):
        value = given.get(slot.path[-1])
        is_set = value is not None and value is not False
        text = "" if value is True else ",".join(value) if isinstance(value, list) else str(value)
        found[slot.option] = text if is_set else None
    return found


def _find_model(annotation: Any) -> tuple[type[BaseModel], bool] | None:
    """Return the model that a parameter names, and whether it receives only the values that the user has set."""
    inner = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    is_given = get_origin(inner) is Given
    model = get_args(inner)[0] if is_given else inner
    return (model, is_given) if isinstance(model, type) and issubclass(model, BaseModel) else None


def _choose_slots(model: type[BaseModel], owner: str, marks: Sequence[Any]) -> Iterator[Slot]:
    slots = {slot.path[-1]: slot for slot in iter_slots(model, owner)}
    changed = next((mark for mark in marks if isinstance(mark, Changed)), Changed())
    chosen: Sequence[str] = [*slots]
    for mark in marks:
        if isinstance(mark, Without):
            chosen = [name for name in chosen if name not in mark]
        elif isinstance(mark, Only):
            chosen = mark
    for name in chosen:
        yield replace(slots[name], flag=replace(slots[name].flag, **changed.get(name, {})))


def _store(tree: dict[str, Any], slot: Slot, value: Any) -> None:
    """Store the *value* of an option at the place of its field, unless the user has not set it."""
    # A switch is False if it is not given, and must then not switch off what a file has switched on.
    if value is None or value == [] or (slot.flag.layered and value is False):
        return
    for key in slot.path[:-1]:
        tree = tree.setdefault(key, {})
    tree[slot.path[-1]] = value


def _build_parameter(slot: Slot) -> inspect.Parameter:
    field, flag = slot.field, slot.flag
    kind: Any = _convert(flag.takes or field.annotation)
    default = field.get_default(call_default_factory=True) if flag.default is ... else flag.default
    default = default if isinstance(default, bool | int | float | str | Path) else None
    shown: str | bool = True if flag.shown is None else flag.shown
    if flag.layered and kind is not bool:
        shown = str(default) if flag.shown is None and default is not None else shown
        # With a default of its own, an option that is not given would override the files.
        kind, default = kind | None, None
    if get_origin(kind) is list:
        shown, default = False, []
    bounds = {name: getattr(mark, name) for mark in field.metadata for name in ("ge", "le") if hasattr(mark, name)}
    option = typer.Option(
        *(flag.names or ((slot.option,) if kind is bool else ())),
        min=flag.least if flag.least is not None else bounds.get("ge"),
        max=bounds.get("le"),
        metavar=flag.metavar,
        help=flag.help or field.description,
        show_default=shown,
        rich_help_panel=flag.panel,
        callback=_build_check(field, kind),
    )
    annotation = Annotated[kind, option]
    return inspect.Parameter(slot.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _build_check(field: FieldInfo, kind: Any) -> Callable[[Any], Any] | None:
    """Return a callback with the checks of a field beyond its bounds, so that errors name the option."""
    validators = [mark.func for mark in field.metadata if isinstance(mark, AfterValidator)]
    is_finite = not any(getattr(mark, "allow_inf_nan", False) for mark in field.metadata)
    if get_origin(kind) is list or not (validators or (_strip(kind) is float and is_finite)):
        return None

    def check(value: Any) -> Any:
        # Typer compares a value with its bounds, and `nan` is neither above nor below any.
        if is_finite and isinstance(value, float) and not math.isfinite(value):
            raise typer.BadParameter(f"{value} is not a finite number")
        if value is not None:
            try:
                for validate in validators:
                    value = validate(value)  # type: ignore[call-arg]  # without pydantic's information
            except ValueError as error:
                raise typer.BadParameter(str(error)) from None
        return value

    return check


def _strip(annotation: Any) -> Any:
    """Return *annotation* without `Annotated` and `None`."""
    if get_origin(annotation) is Annotated:
        return _strip(get_args(annotation)[0])
    if get_origin(annotation) in {Union, UnionType}:
        kinds = [kind for kind in get_args(annotation) if kind is not NoneType]
        return _strip(kinds[0]) if len(kinds) == 1 else annotation
    return annotation


def _convert(annotation: Any) -> Any:
    """Return the type that Typer gets for a field: sequences are lists, and mappings are lists of `KEY=VALUE`."""
    kind: Any = _strip(annotation)
    if get_origin(kind) in {tuple, list}:
        return list.__class_getitem__(_convert(get_args(kind)[0]))
    if get_origin(kind) is Mapping:
        return list[str]
    is_optional = kind is not annotation and NoneType in get_args(annotation)
    return kind | None if is_optional else kind
