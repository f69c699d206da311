"""Find numbers that are not finite in the arguments of a tool call.

JSON has no such numbers, but pydantic reads texts like `"nan"` and `"1e999"` as numbers. The configuration of the
arguments cannot forbid that everywhere, because each model among their types has its own configuration.
"""

from __future__ import annotations

import cmath
import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

SEQUENCES = (list, tuple, set, frozenset, deque)


def find_non_finite(given: Mapping[str, Any], validated: Mapping[str, Any]) -> str | None:
    """Return the path of a number in *validated* that is not finite and that the policy wrote, `None` if there is none.

    Args:
        given: The arguments as JSON values.
        validated: The arguments with the types of the parameters.
    """
    # Without such a text, a number that is not finite is the author's own, such as a default.
    if not any(isinstance(value, str) and _is_non_finite_text(value) for _, value in _iter_values(given)):
        return None
    numbers = ((path, value) for path, value in _iter_values(validated) if isinstance(value, float | complex))
    return next((path for path, value in numbers if not cmath.isfinite(value)), None)


def _is_non_finite_text(text: str) -> bool:
    try:
        # pydantic ignores underscores. All texts of floats are texts of complex numbers.
        return not cmath.isfinite(complex(text.replace("_", "")))
    except ValueError:
        return False


def _iter_values(root: object) -> Iterator[tuple[str, object]]:
    """Yield *root*, the values and keys in it, and so on, each with its path."""
    pending: list[tuple[str, object]] = [("", root)]
    while pending:
        path, value = pending.pop()
        yield path, value
        pending += ((f"{path}.{name}" if path else str(name), child) for name, child in _iter_children(value))


def _iter_children(value: object) -> Iterator[tuple[object, object]]:
    """Yield the members of *value* with their names; of an object, only those that its caller has set."""
    if isinstance(value, Mapping):
        yield from ((key, key) for key in value if isinstance(key, str | float))
        yield from value.items()
    elif isinstance(value, SEQUENCES):
        yield from enumerate(value)
    elif isinstance(value, BaseModel):
        yield from ((name, getattr(value, name)) for name in value.model_fields_set)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ((field, getattr(value, field.name, None)) for field in dataclasses.fields(value))
        yield from ((field.name, child) for field, child in fields if child is not field.default)
