"""The Gymnasium spaces for text, messages, turns and token ids, and their batches, which are object arrays."""

from __future__ import annotations

from copy import deepcopy
from pickle import dumps, loads
from typing import Any

import numpy as np
import pytest
from gymnasium.error import CustomSpaceError
from gymnasium.vector.utils import (
    batch_space,
    concatenate,
    create_empty_array,
    create_shared_memory,
    iterate,
)

import gymsdk.gym.env  # noqa: F401  # registers how `Batch` batches the spaces
from gymsdk.errors import UsageError
from gymsdk.gym.codecs import Chat
from gymsdk.gym.spaces import Batch, Messages, Prose, Tokens, Turns, build_object_array, list_values

SPACES = [Prose(), Messages(), Turns(), Tokens(256), Tokens()]
PROSE = ["", "plain", "naïve café", "你好世界", "👩‍💻🏳️‍🌈", "a\0b", "\u202eabc", "x" * 100_000, "\ud800"]
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


@pytest.mark.parametrize("text", PROSE)
def test_any_text_is_in_every_text_space(text: str) -> None:
    message = {"role": "user", "content": text}
    parts = {
        "role": "user",
        "content": [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": "u"}}],
    }
    assert text in Prose()
    assert text in Turns()
    assert [message, parts] in Messages()
    assert {"role": "assistant", "content": text} in Turns()


@pytest.mark.parametrize(
    "turn",
    [
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"content": "the role goes without saying"},
        {"role": "assistant"},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": None, "refusal": "No."},
        ({"type": "message", "role": "assistant", "content": "so"},),
        [{"type": "function_call", "name": "look", "arguments": "{}", "call_id": "c1"}],
        [{"type": "reasoning", "summary": []}, {"type": "message", "role": "assistant", "content": "so"}],
        [],
    ],
)
def test_a_turn_is_a_reply_a_message_or_items(turn: Any) -> None:
    assert turn in Turns()
    Chat().parse_action(turn, turn=0)


def test_messages_must_be_a_list_of_chat_messages() -> None:
    for observation in ("text", {"role": "user", "content": ""}, [{"role": "robot", "content": ""}], [3]):
        assert observation not in Messages()
    assert [{"role": "tool", "tool_call_id": "c1", "content": "42"}] in Messages()
    assert [] in Messages()


@pytest.mark.parametrize("space", [*SPACES, *(Batch(space, 3) for space in SPACES)], ids=repr)
def test_samples_are_in_the_space_and_depend_only_on_the_seed(space: Any) -> None:
    drawn = []
    for _ in range(2):
        space.seed(3)
        drawn.append([space.sample() for _ in range(50)])
    assert repr(drawn[0]) == repr(drawn[1])
    assert all(sample in space for sample in drawn[0])
    assert len({repr(sample) for sample in drawn[0]}) > 20


@pytest.mark.parametrize("space", SPACES, ids=repr)
def test_a_space_equals_only_its_copies(space: Any) -> None:
    assert deepcopy(space) == space
    assert loads(dumps(space)) == space
    assert hash(deepcopy(space)) == hash(space)
    assert sum(space == other for other in SPACES) == 1


@pytest.mark.parametrize("space", SPACES, ids=repr)
def test_gymnasium_batches_the_spaces_as_object_arrays(space: Any) -> None:
    batch = batch_space(space, 3)
    sample = batch.sample()
    assert list(iterate(batch, sample)) == list(sample)
    joined = concatenate(space, list(sample), create_empty_array(space, 3))
    assert (joined.dtype, list(joined)) == (object, list(sample))


@pytest.mark.parametrize("space", SPACES, ids=repr)
def test_shared_memory_rejects_the_spaces(space: Any) -> None:
    with pytest.raises(CustomSpaceError):
        create_shared_memory(space, 2)


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
