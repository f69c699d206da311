"""An environment's settings: its declared config filled from names and values, models it asks for resolved."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from gymsdk import complaints
from gymsdk.errors import BadConfig, suggestion
from gymsdk.models import registry
from gymsdk.models.metered import Metered
from gymsdk.types import Config, Model


def configured(name: str, kind: type[Config], given: Mapping[str, Any]) -> Config:
    """Give environment *name*'s config; raises `BadConfig` naming the setting that is unknown, missing or wrong."""
    for key in given:
        if key not in kind.model_fields:
            known = ", ".join(kind.model_fields) or "none"
            near = suggestion(key, kind.model_fields, f"its settings: {known}")
            raise BadConfig(f"environment {name!r} has no setting {key!r}{near}")
    models = {
        key: _metered(key, given.get(key, field.get_default(call_default_factory=True)))
        for key, field in kind.model_fields.items()
        if asks_for_model(field) and (key in given or not field.is_required())
    }
    try:
        return kind.model_validate({**given, **models})
    except ValidationError as error:
        raise BadConfig(f"environment {name!r}: {_sentence(kind, error)}") from None


def asks_for_model(field: FieldInfo) -> bool:
    """Whether a config field is annotated with `Model`, alone or among others."""
    return field.annotation is Model or Model in typing.get_args(field.annotation)


def _metered(role: str, value: object) -> object:
    if isinstance(value, str) and value:
        value = registry.model(value)
    return Metered(value, role=role) if isinstance(value, Model) and not isinstance(value, Metered) else value


def _sentence(kind: type[Config], error: ValidationError) -> str:
    return "; ".join(_complaint(kind, each) for each in error.errors())


def _complaint(kind: type[Config], each: Mapping[str, Any]) -> str:
    where = complaints.place(each)
    if each["type"] == "missing":
        return f"setting {where!r} is required; give it with --set {where}={_example(kind, where)}"
    about = f"setting {where!r} is wrong" if where else "its settings do not fit"
    return f"{about}: {complaints.said(each)} (got {each['input']!r})"


def _example(kind: type[Config], where: str) -> str:
    field = kind.model_fields.get(where)
    return "PROVIDER/NAME" if field and asks_for_model(field) else "VALUE"
