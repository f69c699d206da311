"""Batched observations and actions are object arrays for every kind of value."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import Space

from gymsdk import UsageError
from gymsdk.gym.spaces import Batch, Messages, Prose, Tokens, Turns, build_object_array, list_values

SPACES = [Messages(), Prose(), Tokens(300), Turns()]


@pytest.mark.parametrize("single", SPACES)
def test_a_sample_is_in_the_space_and_depends_only_on_the_seed(single: Space[Any]) -> None:
    space, other = Batch(single, 3), Batch(single, 3)
    space.seed(4)
    other.seed(4)
    sample = space.sample()
    assert sample in space
    assert list(sample) == list(other.sample())


def test_a_batch_is_a_sequence_of_valid_values() -> None:
    wrong: tuple[Any, ...] = (["a"], "ab", 3, ["a", 4], np.array(4), {"a": 1, "b": 2}, b"ab")
    assert [batch in Batch(Prose(), 2) for batch in wrong] == [False] * 7
    for batch in (["a", "b"], ("a", "b"), np.array(["a", "b"]), build_object_array(["a", "b"])):
        assert batch in Batch(Prose(), 2)


def test_batches_of_different_sizes_or_spaces_differ() -> None:
    assert Batch(Tokens(3), 2) != Batch(Tokens(4), 2)
    assert Batch(Tokens(3), 2) != Batch(Tokens(3), 3)
    assert hash(Batch(Tokens(3), 2)) == hash(Batch(Tokens(3), 2))
    assert repr(Batch(Tokens(3), 2)) == "Batch(Tokens(3), 2)"


def test_values_are_listed_one_per_slot() -> None:
    assert build_object_array([[1, 2], [3, 4]]).shape == (2,)
    assert [row.tolist() for row in list_values(np.array([[1, 2], [3, 4]]), 2)] == [[1, 2], [3, 4]]
    assert [type(value) for value in list_values(np.array(["a", "bb"]), 2)] == [str, str]
    with pytest.raises(UsageError, match="3 values, one per slot; got 2"):
        list_values(["a", "b"], 3)
