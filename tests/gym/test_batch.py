"""Batched observations and actions are object arrays for every kind of value."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import Space
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from gymsdk import UsageError
from gymsdk.gym.spaces import Batch, Messages, Prose, Tokens, Turns, build_object_array, list_values

SPACES = [Messages(), Prose(), Tokens(300), Turns()]


@pytest.mark.parametrize("single", SPACES)
def test_gymnasium_batches_our_spaces_as_batch_does(single: Space[Any]) -> None:
    space = batch_space(single, 3)
    values = [single.sample() for _ in range(3)]
    together = concatenate(single, values, create_empty_array(single, 3))
    assert space == Batch(single, 3)
    assert together in space
    assert list(iterate(space, together)) == values


@pytest.mark.parametrize("single", SPACES)
def test_a_sample_is_in_the_space_and_depends_only_on_the_seed(single: Space[Any]) -> None:
    space, other = Batch(single, 3), Batch(single, 3)
    space.seed(4)
    other.seed(4)
    sample = space.sample()
    assert sample in space
    assert list(sample) == list(other.sample())


@pytest.mark.parametrize("batch", [["a"], "ab", 3, ["a", 4], np.array(4), {"a": 1, "b": 2}, b"ab"])
def test_a_value_that_is_not_a_batch_is_not_in_the_space(batch: Any) -> None:
    assert batch not in Batch(Prose(), 2)


@pytest.mark.parametrize("batch", [["a", "b"], ("a", "b"), np.array(["a", "b"]), build_object_array(["a", "b"])])
def test_any_sequence_of_valid_values_is_in_the_space(batch: Any) -> None:
    assert batch in Batch(Prose(), 2)


def test_batches_of_different_sizes_or_spaces_differ() -> None:
    assert Batch(Tokens(3), 2) != Batch(Tokens(4), 2)
    assert Batch(Tokens(3), 2) != Batch(Tokens(3), 3)
    assert hash(Batch(Tokens(3), 2)) == hash(Batch(Tokens(3), 2))
    assert repr(Batch(Tokens(3), 2)) == "Batch(Tokens(3), 2)"


def test_lists_of_equal_length_are_not_merged_into_a_matrix() -> None:
    assert build_object_array([[1, 2], [3, 4]]).shape == (2,)


def test_rows_of_an_array_become_separate_values() -> None:
    rows = list_values(np.array([[1, 2], [3, 4]]), 2)
    assert [row.tolist() for row in rows] == [[1, 2], [3, 4]]


def test_numpy_strings_become_python_strings() -> None:
    assert [type(value) for value in list_values(np.array(["a", "bb"]), 2)] == [str, str]


def test_a_batch_of_the_wrong_length_is_rejected() -> None:
    with pytest.raises(UsageError, match="3 values, one per slot; got 2"):
        list_values(["a", "b"], 3)
