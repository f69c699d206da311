"""JSON is read and written without loss, for any size and any position of numbers."""

from __future__ import annotations

import dataclasses
import enum
import json
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymsdk.jsonl import READ_BUFFER_BYTES, dump_canonical_json, dump_json, parse_json, read_lines

EDGES = [
    sign * (base + more)
    for base in (2**53, 2**63, 2**64, 10**18, 10**19, 10**20, 10**400)
    for more in (-1, 0, 1)
    for sign in (1, -1)
]
NUMBERS = st.sampled_from(EDGES) | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    NUMBERS | st.none() | st.booleans() | st.text(),
    lambda below: st.lists(below) | st.dictionaries(st.text(), below),
    max_leaves=20,
)


@pytest.mark.slow
@given(value=VALUES, padding=st.integers(0, 5000), indent=st.sampled_from([None, 1]))
def test_values_survive_the_round_trip(value: object, padding: int, indent: int | None) -> None:
    whole = {"padding": "x" * padding, "value": value}
    for text in (
        dump_json(whole),
        dump_json(whole, indent=True),
        dump_canonical_json(whole),
        json.dumps(whole, indent=indent).encode(),
    ):
        found = parse_json(text)
        assert found == whole
        assert repr(found["value"]) == repr(value) or isinstance(value, (dict, list))


@pytest.mark.parametrize("text", ["%s", "[%s]", "[1,%s]", '{"a":%s}', '{"a":\t%s\n}', '[0.1, "-", %s ]'])
def test_an_integer_stays_an_integer_at_any_position(text: str) -> None:
    for number in EDGES:
        found = parse_json(text % number)
        while not isinstance(found, int):
            found = list(found.values() if isinstance(found, dict) else found)[-1]
        assert (type(found), found) == (int, number)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1" * 5_000_000, "an integer has 5,000,000 digits; at most 4,300 are read"),
        (f"[{'1' * 4301}]", "4,301 digits"),
        ("[1e400]", "infinity"),
        (f"[1e400, {10**30}]", "larger than the largest double"),
        (f"[NaN, {10**30}]", "NaN is not a JSON number"),
        ("[" * 100_000 + str(10**30) + "]" * 100_000, "nested too deeply"),
    ],
)
def test_an_unreadable_number_is_rejected(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_json(text)


def test_non_finite_numbers_become_null() -> None:
    odd = {"nan": float("nan"), "more": [float("inf")]}
    for value in (odd, odd | {"large": 10**30}):
        assert json.loads(dump_json(value)) == {**value, "nan": None, "more": [None]}


def test_half_a_surrogate_pair_is_accepted_by_default_and_can_be_rejected() -> None:
    for text in (r'{"a": "\ud800"}', rf'{{"a": "\ud800", "b": {10**30}}}'):
        assert parse_json(text)["a"] == "\ud800"
        with pytest.raises(ValueError, match="surrogate"):
            parse_json(text, strict=True)
    assert parse_json(dump_json({"a": "\ud800", "b": 10**30})) == {"a": "\ud800", "b": 10**30}
    assert parse_json(dump_json({"a": "\ud800"}, replace_surrogates=True), strict=True) == {"a": "?"}


class Colour(enum.Enum):
    RED = "red"
    PAIR = (1, 2.5)


@dataclasses.dataclass
class Point:
    x: int
    when: datetime
    _private: int = 0


@dataclasses.dataclass(slots=True)
class Slotted:
    point: Point
    _private: int = 0


WHEN = datetime(2024, 2, 29, 12, 30, 1, 5, tzinfo=UTC)
RICH = [
    Point(1, WHEN),
    Slotted(Point(2, WHEN.replace(tzinfo=None))),
    [WHEN.date(), WHEN.time(), UUID(int=7), Colour.RED, Colour.PAIR, (1, None, True, float("nan"))],
    {Colour.RED: 1, WHEN: 2, WHEN.date(): 3, UUID(int=7): 4, 1.5: 5, None: 6, True: 7, 8: 8},
    {"nested": [{"point": Point(3, WHEN)}]},
    {"a set": {1}},
]


@pytest.mark.parametrize("value", RICH, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("indent", [False, True])
def test_a_large_integer_does_not_change_the_serialization_of_other_values(value: object, indent: bool) -> None:
    alone = dump_json({"value": value}, indent=indent, default=list)
    beside = dump_json({"value": value, "large": 10**30}, indent=indent, default=list)
    assert list(json.loads(beside)["value"]) == list(json.loads(alone)["value"])
    assert json.loads(beside) == {**json.loads(alone), "large": 10**30}


def test_a_recursive_or_unsupported_value_is_rejected() -> None:
    loop: list[object] = [10**30]
    loop.append(loop)
    with pytest.raises(ValueError, match="contains itself"):
        dump_json(loop)
    for unsupported in ({1, 2}, b"bytes", object()):
        with pytest.raises(TypeError):
            dump_json({"value": unsupported, "large": 10**30})


@pytest.mark.parametrize("place", ["before", "after", "inside"])
def test_a_large_integer_beside_long_lists_of_token_ids_is_exact(place: str) -> None:
    logprobs = [-0.1234567890123456789 / (number + 1) for number in range(3000)]
    item: dict[str, object] = {"generation_token_ids": [*range(3000)], "generation_log_probs": logprobs}
    if place == "inside":
        item["metadata"] = [{"answer": 10**30}]
    value = {"answer": 10**30, "output": [item]} if place == "before" else {"output": [item], "answer": 10**30}
    assert parse_json(dump_json(value)) == value


def _count_reads() -> int:
    """Return how many times this process has read from a file or a socket."""
    return int(Path("/proc/self/io").read_text().partition("syscr:")[2].split()[0])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="this system does not count the reads of a process")
def test_a_file_is_read_in_large_blocks(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"question": "' + b"x" * 1000 + b'"}\n')
    path.write_bytes(path.read_bytes() * 8192)
    before = _count_reads()
    assert sum(1 for _ in read_lines(path)) == 8192
    # Each block, the byte order mark, the end of the file, and reads of other threads.
    assert _count_reads() - before < 2 * path.stat().st_size / READ_BUFFER_BYTES + 20
