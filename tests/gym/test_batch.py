"""Batches of observations and actions: object arrays, whatever is in them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import Space
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from gymsdk import UsageError
from gymsdk.gym.batch import Batch, build_object_array, list_values
from gymsdk.gym.spaces import Messages, Prose, Tokens, Turns

SPACES = [Messages(), Prose(), Tokens(300), Turns()]


@pytest.mark.parametrize("single", SPACES)
def test_gymnasium_batches_our_spaces_as_we_do(single: Space[Any]) -> None:
    space = batch_space(single, 3)
    values = [single.sample() for _ in range(3)]
    together = concatenate(single, values, create_empty_array(single, 3))
    assert space == Batch(single, 3)
    assert together in space
    assert list(iterate(space, together)) == values


@pytest.mark.parametrize("single", SPACES)
def test_a_sample_is_in_the_space_and_its_seed_decides_it(single: Space[Any]) -> None:
    space, other = Batch(single, 3), Batch(single, 3)
    space.seed(4)
    other.seed(4)
    sample = space.sample()
    assert sample in space
    assert list(sample) == list(other.sample())


@pytest.mark.parametrize("batch", [["a"], "ab", 3, ["a", 4], np.array(4), {"a": 1, "b": 2}, b"ab"])
def test_what_is_no_batch_is_not_in_the_space(batch: Any) -> None:
    assert batch not in Batch(Prose(), 2)


@pytest.mark.parametrize("batch", [["a", "b"], ("a", "b"), np.array(["a", "b"]), build_object_array(["a", "b"])])
def test_any_sequence_of_the_right_values_is_in_the_space(batch: Any) -> None:
    assert batch in Batch(Prose(), 2)


def test_spaces_of_other_sizes_or_other_values_differ() -> None:
    assert Batch(Tokens(3), 2) != Batch(Tokens(4), 2)
    assert Batch(Tokens(3), 2) != Batch(Tokens(3), 3)
    assert hash(Batch(Tokens(3), 2)) == hash(Batch(Tokens(3), 2))
    assert repr(Batch(Tokens(3), 2)) == "Batch(Tokens(3), 2)"


def test_lists_as_long_as_each_other_stay_values() -> None:
    assert build_object_array([[1, 2], [3, 4]]).shape == (2,)


def test_rows_of_an_array_are_values() -> None:
    rows = list_values(np.array([[1, 2], [3, 4]]), 2)
    assert [row.tolist() for row in rows] == [[1, 2], [3, 4]]


def test_numpys_strings_become_strings() -> None:
    assert [type(value) for value in list_values(np.array(["a", "bb"]), 2)] == [str, str]


def test_a_wrong_length_is_told() -> None:
    with pytest.raises(UsageError, match="3 values, one per slot; got 2"):
        list_values(["a", "b"], 3)
