"""A batch's infos: those of all seats in one dict, in Gymnasium's convention, and each seat's own out of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gymsdk.gym.batch import objects
from gymsdk.gym.seat import Info

WIDE = 2**63
"""From here on an integer does not fit NumPy's."""


def merged(infos: Sequence[Info]) -> Info:
    """Give one dict for the seats' *infos*: under a key an array over the seats, under `_key` whose info has it.

    Dicts become a dict of arrays, numbers of one type an array of that type, everything else an array of objects; so
    do dicts beside something else, and dicts whose keys would be taken for masks. `info_of` gives each back.
    """
    keys = dict.fromkeys(key for info in infos for key in info)
    batch: Info = {}
    for key in keys:
        has = np.fromiter((key in info for info in infos), dtype=np.bool_, count=len(infos))
        batch[key], batch[f"_{key}"] = _column(infos, key, has), has
    return batch


def info_of(infos: Info, index: int) -> Info:
    """Give the info of the seat at *index* out of a batch's *infos*, just as the seat gave it."""
    return {
        key: _plain(value, index)
        for key, value in infos.items()
        if not key.startswith("_") and (f"_{key}" not in infos or infos[f"_{key}"][index])
    }


def _column(infos: Sequence[Info], key: str, has: NDArray[np.bool_]) -> Any:
    values = [info[key] for info in infos if key in info]
    if all(map(_nests, values)):
        return merged([info.get(key, {}) for info in infos])
    kind = type(values[0])
    if kind in {bool, int, float} and all(type(value) is kind and _fits(value) for value in values):
        numbers = np.zeros(len(infos), dtype=kind)
        numbers[has] = values
        return numbers
    return objects(info.get(key) for info in infos)


def _nests(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(key, str) and not key.startswith("_") for key in value)


def _fits(number: float) -> bool:
    return isinstance(number, float) or -WIDE <= number < WIDE


def _plain(column: Any, index: int) -> Any:
    if isinstance(column, dict):
        return info_of(column, index)
    value = column[index]
    return value.item() if isinstance(value, np.generic) else value
