"""The infos of many slots are merged into one dict, from which each info can be recovered."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymsdk.gym.vector import get_info, merge_infos

scalars = st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=3))
names = st.sampled_from(["a", "b", "_a", "__a", "", "é"])
values = st.recursive(
    scalars,
    lambda each: st.one_of(st.lists(each, max_size=2), st.dictionaries(names, each, max_size=3)),
    max_leaves=6,
)
infos = st.dictionaries(st.sampled_from(["a", "b", "c"]), values)


def to_json(value: Any) -> str:
    """Return the value as JSON, which keeps the types of its numbers, with sorted keys."""
    return json.dumps(value, sort_keys=True)


@pytest.mark.slow
@given(st.lists(infos, min_size=1, max_size=4))
def test_every_info_can_be_recovered(slot_infos: list[dict[str, Any]]) -> None:
    batch = merge_infos(slot_infos)
    assert [to_json(get_info(batch, index)) for index in range(len(slot_infos))] == [
        to_json(info) for info in slot_infos
    ]


def test_numbers_of_one_type_become_a_typed_array_and_lists_stay_lists() -> None:
    batch = merge_infos([{"n": 1, "x": 0.5, "b": True, "tools": [1, 2]}, {}, {"n": 3, "tools": [3, 4]}])
    assert [batch[key].dtype for key in ("n", "x", "b")] == [np.int64, np.float64, np.bool_]
    assert (batch["n"].tolist(), batch["_n"].tolist()) == ([1, 0, 3], [True, False, True])
    assert (batch["tools"].shape, batch["tools"][2]) == ((3,), [3, 4])


def test_dicts_become_dicts_of_arrays_with_their_own_masks() -> None:
    batch = merge_infos([{"verdict": {"reward": 1.0}}, {"verdict": {"reward": 0.5, "odd": None}}, {}])
    assert batch["verdict"]["reward"].tolist() == [1.0, 0.5, 0.0]
    assert batch["verdict"]["_odd"].tolist() == [False, True, False]
    assert batch["_verdict"].tolist() == [True, True, False]


def test_a_value_without_a_mask_belongs_to_every_slot() -> None:
    batch = merge_infos([{}, {}]) | {"episode": {"r": np.array([1.0, 2.0])}}
    assert get_info(batch, 1) == {"episode": {"r": 2.0}}
