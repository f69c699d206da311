"""An environment's settings: its declared config filled from names and values, models it asks for resolved."""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from gymsdk import complaints
from gymsdk.configuration.veiling import is_secret
from gymsdk.errors import BadConfig, BrokenEnvironment, UsageError, suggestion
from gymsdk.models import registry
from gymsdk.models.metered import Metered
from gymsdk.types import Config, Model


def configured(name: str, kind: type[Config], given: Mapping[str, Any]) -> Config:
    """Give environment *name*'s config; raises `BadConfig` naming the setting that is unknown, missing or wrong."""
    known = f"its settings: {', '.join(kind.model_fields) or 'none'}"
    unknown = {key: suggestion(key, kind.model_fields, known) for key in given if key not in kind.model_fields}
    if unknown:
        told = [f"environment {name!r} has no setting {key!r}{near}" for key, near in unknown.items()]
        about = [((key,), f"no setting of environment {name!r}{near}") for key, near in unknown.items()]
        raise _about(BadConfig(told[0]), about)
    models = {
        key: _metered(key, given.get(key, field.get_default(call_default_factory=True)))
        for key, field in kind.model_fields.items()
        if asks_for_model(field) and (key in given or not field.is_required())
    }
    try:
        return kind.model_validate({**given, **models})
    except ValidationError as error:
        wrong = [(tuple(map(str, each["loc"])), _said(each)) for each in error.errors(include_input=False)]
        raise _about(BadConfig(f"environment {name!r}: {_sentence(kind, error)}"), wrong) from None
    except complaints.INTERRUPTS:
        raise
    except BaseException as error:
        raise BrokenEnvironment(f"environment {name!r}: its config raised {complaints.raised(error)}") from error


def asks_for_model(field: FieldInfo) -> bool:
    """Whether a config field is annotated with `Model`, alone or among others."""
    return field.annotation is Model or Model in typing.get_args(field.annotation)


def _metered(role: str, value: object) -> object:
    if isinstance(value, str) and value:
        try:
            value = registry.model(value)
        except UsageError as error:
            _about(error, [((role,), str(error))])
            raise
    return Metered(value, role=role) if isinstance(value, Model) and not isinstance(value, Metered) else value


def _about(error: UsageError, sentences: Sequence[tuple[tuple[str, ...], str]]) -> UsageError:
    """Give *error* with a sentence for each setting it is about."""
    error.setting_errors = tuple(sentences)
    return error


def _said(each: Mapping[str, Any]) -> str:
    words = complaints.said(each)
    return words[:1].lower() + words[1:]


def _sentence(kind: type[Config], error: ValidationError) -> str:
    return "; ".join(_complaint(kind, each) for each in error.errors())


def _complaint(kind: type[Config], each: Mapping[str, Any]) -> str:
    where = complaints.place(each)
    if each["type"] == "missing":
        return f"setting {where!r} is required; give it with --set {where}={_example(kind, where)}"
    about = f"setting {where!r} is wrong" if where else "its settings do not fit"
    got = "" if _hides(kind, each["loc"]) else f" (got {each['input']!r})"
    return f"{about}: {complaints.said(each)}{got}"


def _hides(kind: type[Config], way: tuple[int | str, ...]) -> bool:
    """Whether what *way* leads to may be a key: nobody is told it."""
    if not way:
        return any(_keeps_secret(name, field) for name, field in kind.model_fields.items())
    field = kind.model_fields.get(str(way[0]))
    return any(is_secret((str(key),)) for key in way) or (field is not None and _keeps_secret(str(way[0]), field))


def _keeps_secret(name: str, field: FieldInfo) -> bool:
    return "Secret" in str(field.annotation) or is_secret((name,))


def _example(kind: type[Config], where: str) -> str:
    field = kind.model_fields.get(where)
    return "PROVIDER/NAME" if field and asks_for_model(field) else "VALUE"
