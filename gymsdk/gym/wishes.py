"""A wish: what a vector's `reset` asks of one seat, its seed and its options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from gymsdk.errors import UsageError

Seeds: TypeAlias = int | Sequence[int | None] | None
"""One seed, from which the seats count on, or each seat's own."""


class Wish(NamedTuple):
    """The seed and the options one seat is reset with."""

    seed: int | None
    options: Mapping[str, Any]


def wishes(size: int, seed: Seeds, options: Mapping[str, Any] | None) -> dict[int, Wish]:
    """Give what is asked of each of *size* seats, by its index; one that `reset_mask` leaves out is not among them.

    A list under `task` has one for each seat. Raises `UsageError`.
    """
    shared = dict(mapping(options))
    chosen = _chosen(shared.pop("reset_mask"), size) if "reset_mask" in shared else range(size)
    seeds, tasks = _seeds(seed, size), shared.get("task")
    if not isinstance(tasks, (list, tuple, np.ndarray)):
        return {index: Wish(seeds[index], shared) for index in chosen}
    if len(tasks) != size:
        raise UsageError(f"options['task'] is one task or one for each of {size} seats; this list has {len(tasks)}")
    return {index: Wish(seeds[index], shared | {"task": _task(tasks[index])}) for index in chosen}


def mapping(options: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Give the *options* of a reset, an empty dict where there are none; raises `UsageError` where they are no dict."""
    if options is not None and not isinstance(options, Mapping):
        raise UsageError(f"the options of reset are a dict, as in options={{'task': 3}}, not {options!r}")
    return {} if options is None else options


def _chosen(mask: object, size: int) -> list[int]:
    if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_ or mask.shape != (size,):
        raise UsageError(f"options['reset_mask'] is a boolean array with one value for each of {size} seats")
    if not mask.any():
        raise UsageError("options['reset_mask'] resets no seat; set at least one of its values")
    return [int(index) for index in np.flatnonzero(mask)]


def _seeds(seed: Seeds, size: int) -> list[int | None]:
    if seed is None:
        return [None] * size
    if isinstance(seed, Integral):
        return [int(seed) + index for index in range(size)]
    if not isinstance(seed, (list, tuple, np.ndarray)) or len(seed) != size or not all(map(_is_seed, seed)):
        raise UsageError(f"seed is a whole number, or a list of one (or None) for each of {size} seats, not {seed!r}")
    return [None if each is None else int(each) for each in seed]


def _is_seed(seed: object) -> bool:
    return seed is None or isinstance(seed, Integral)


def _task(task: Any) -> Any:
    # What comes out of an array of names or numbers is NumPy's own kind of each.
    return task.item() if isinstance(task, np.generic) else task
