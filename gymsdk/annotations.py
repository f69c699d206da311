"""The annotations of an author's function, read one at a time so that one the reader does not need cannot fail."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


def parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Give the parameters of *function* by name, `self` of a bound method left out."""
    return dict(inspect.signature(function).parameters)


def annotation(function: Callable[..., Any], parameter: str) -> Any:
    """Give the resolved annotation of one parameter, `None` where there is none.

    Raises `NameError` where it means nothing at run time.
    """
    plain = inspect.unwrap(getattr(function, "__func__", function))
    written = getattr(plain, "__annotations__", {}).get(parameter)
    if written is None:
        return None
    holder = SimpleNamespace(__annotations__={parameter: written})
    try:
        return typing.get_type_hints(holder, getattr(plain, "__globals__", {}), include_extras=True)[parameter]
    except (AttributeError, SyntaxError, TypeError) as error:
        raise NameError(f"{written!r}: {error}") from error
