"""The space of a vector environment's observations or actions: an object array with one value per slot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from typing import Any, TypeAlias

import numpy as np
from gymnasium import Space
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate
from numpy.typing import NDArray

from gymsdk.errors import UsageError
from gymsdk.gym.spaces import Messages, Prose, Tokens, Turns

ObjectArray: TypeAlias = NDArray[np.object_]
"""An array with one Python object per slot."""


class Batch(Space[Any]):
    """Object arrays, or other sequences, of *size* values of the space *single*."""

    def __init__(self, single: Space[Any], size: int, seed: int | np.random.Generator | None = None) -> None:
        # A copy: sampling from the batch must not advance the generator of the single space.
        self.single, self.size = deepcopy(single), size
        super().__init__(shape=(size,), dtype=object, seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        """Return `False`: the values are no numbers."""
        return False

    def seed(self, seed: Any = None) -> Any:
        """Seed the sampling; return the seed."""
        given = super().seed(seed)
        self.single.seed(int(self.np_random.integers(2**31)))
        return given

    def contains(self, x: Any) -> bool:
        """Return whether *x* is a sequence of *size* values of the single space."""
        try:
            values = list_values(x, self.size)
        except UsageError:
            return False
        return all(map(self.single.contains, values))

    def sample(self, mask: None = None, probability: None = None) -> ObjectArray:  # noqa: ARG002  # Gymnasium's signature
        """Sample one value per slot."""
        return build_object_array([self.single.sample() for _ in range(self.size)])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Batch) and (self.single, self.size) == (other.single, other.size)

    def __hash__(self) -> int:
        return hash((self.single, self.size))

    def __repr__(self) -> str:
        return f"Batch({self.single!r}, {self.size})"


def build_object_array(values: Iterable[Any]) -> ObjectArray:
    """Return an object array that holds *values* unchanged."""
    listed = list(values)
    array = np.empty(len(listed), dtype=object)
    # One assignment per value: NumPy would convert lists of equal length to rows.
    for index, value in enumerate(listed):
        array[index] = value
    return array


def list_values(batch: Any, size: int) -> list[Any]:
    """Return the values of a batch as a list; raises `UsageError` unless *batch* is a sequence of *size* values."""
    listed = isinstance(batch, Sequence) and not isinstance(batch, (str, bytes))
    if not listed and not (isinstance(batch, np.ndarray) and batch.ndim):
        raise UsageError(f"a batch must be a list or array of {size} values, one per slot; got {_describe(batch)}")
    if len(batch) != size:
        raise UsageError(f"a batch must have {size} values, one per slot; got {len(batch)}")
    return [str(value) if isinstance(value, np.str_) else value for value in batch]


def _describe(batch: object) -> str:
    return "a zero-dimensional array" if isinstance(batch, np.ndarray) else type(batch).__name__


def _batch_space(space: Space[Any], n: int = 1) -> Batch:
    return Batch(space, n, seed=deepcopy(space.np_random))


def _concatenate(space: Space[Any], items: Iterable[Any], out: Any) -> ObjectArray:  # noqa: ARG001  # Gymnasium's signature
    return build_object_array(items)


def _create_empty_array(space: Space[Any], n: int = 1, fn: Any = None) -> ObjectArray:  # noqa: ARG001  # Gymnasium's signature
    return np.full(n, None, dtype=object)


def _iterate(space: Batch, items: Any) -> Iterator[Any]:
    return iter(list_values(items, space.size))


# Gymnasium's own vector environments and wrappers then batch these spaces in the same way.
for _kind in (Messages, Prose, Tokens, Turns):
    batch_space.register(_kind, _batch_space)
    concatenate.register(_kind, _concatenate)
    create_empty_array.register(_kind, _create_empty_array)
iterate.register(Batch, _iterate)
