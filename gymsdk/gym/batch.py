"""A batch: the space of many seats' observations or actions, an object array with one of them for each."""

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

Objects: TypeAlias = NDArray[np.object_]
"""One Python object for each seat."""


class Batch(Space[Any]):
    """Object arrays of *size* values of the *single* space; any other sequence of as many is as good."""

    def __init__(self, single: Space[Any], size: int, seed: int | np.random.Generator | None = None) -> None:
        # A space draws from its own generator: sampling from the batch must not move the single one's.
        self.single, self.size = deepcopy(single), size
        super().__init__(shape=(size,), dtype=object, seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        """Whether it fits an array of numbers: it does not."""
        return False

    def seed(self, seed: Any = None) -> Any:
        """Seed what is sampled; gives the seed."""
        given = super().seed(seed)
        self.single.seed(int(self.np_random.integers(2**31)))
        return given

    def contains(self, x: Any) -> bool:
        """Whether *x* is a sequence of *size* values of the single space."""
        try:
            values = values_of(x, self.size)
        except UsageError:
            return False
        return all(map(self.single.contains, values))

    def sample(self, mask: None = None, probability: None = None) -> Objects:  # noqa: ARG002  # Gymnasium's signature
        """Give a sample for each seat."""
        return objects([self.single.sample() for _ in range(self.size)])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Batch) and (self.single, self.size) == (other.single, other.size)

    def __hash__(self) -> int:
        return hash((self.single, self.size))

    def __repr__(self) -> str:
        return f"Batch({self.single!r}, {self.size})"


def objects(values: Iterable[Any]) -> Objects:
    """Give an array that holds *values* as they are."""
    listed = list(values)
    array = np.empty(len(listed), dtype=object)
    # One by one: NumPy would make rows of lists that are as long as each other.
    for index, value in enumerate(listed):
        array[index] = value
    return array


def values_of(batch: Any, size: int) -> list[Any]:
    """Give the *size* values of a sequence or an array; raises `UsageError` where it is none, or of another length."""
    listed = isinstance(batch, Sequence) and not isinstance(batch, (str, bytes))
    if not listed and not (isinstance(batch, np.ndarray) and batch.ndim):
        raise UsageError(f"a batch is a list or an array with one value for each of {size} seats, not {_told(batch)}")
    if len(batch) != size:
        raise UsageError(f"a batch has one value for each of {size} seats; this one has {len(batch)}")
    return [str(value) if isinstance(value, np.str_) else value for value in batch]


def _told(batch: object) -> str:
    return "an array of no dimensions" if isinstance(batch, np.ndarray) else type(batch).__name__


def _batched(space: Space[Any], n: int = 1) -> Batch:
    return Batch(space, n, seed=deepcopy(space.np_random))


def _concatenated(space: Space[Any], items: Iterable[Any], out: Any) -> Objects:  # noqa: ARG001  # Gymnasium's signature
    return objects(items)


def _empty(space: Space[Any], n: int = 1, fn: Any = None) -> Objects:  # noqa: ARG001  # Gymnasium's signature
    return np.full(n, None, dtype=object)


def _iterated(space: Batch, items: Any) -> Iterator[Any]:
    return iter(values_of(items, space.size))


# Gymnasium's own vector environments and wrappers batch these spaces in the same way then.
for _kind in (Messages, Prose, Tokens, Turns):
    batch_space.register(_kind, _batched)
    concatenate.register(_kind, _concatenated)
    create_empty_array.register(_kind, _empty)
iterate.register(Batch, _iterated)
