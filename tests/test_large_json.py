"""Parse large JSON in chunks: the same values as in one pass, within the limits."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymsdk.http import bodies
from gymsdk.http.bodies import MIN_LARGE_BYTES, VALUES_PER_CONTAINER, TooComplex, loads, loads_async
from gymsdk.jsonl import parse_json

TEXT = st.text(st.sampled_from('ab"\\[]{},: é\n'), max_size=8)
SCALARS = (
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.floats(allow_nan=False, allow_infinity=False) | TEXT
)
JSON = st.recursive(
    SCALARS, lambda below: st.lists(below, max_size=6) | st.dictionaries(TEXT, below, max_size=6), max_leaves=40
)


def read(text: bytes, parse: Callable[[bytes], object]) -> object:
    """The parsed value as text that distinguishes 1 from 1.0 and keeps the order of keys; `None` for an error."""
    try:
        return json.dumps(parse(text))
    except ValueError:
        return None


@pytest.mark.parametrize("exact", [True, False])
async def test_a_large_integer_in_a_large_text_is_exact_unless_the_caller_does_not_need_it(exact: bool) -> None:
    large = 12345678901234567890123
    text = json.dumps({"large": large, "ids": [*range(100_000)], "log_probs": [-0.12345678901234567]}).encode()
    assert len(text) > MIN_LARGE_BYTES
    value = await loads_async(text, exact=exact)
    assert isinstance(value, dict)
    assert value == json.loads(text) | {"large": large if exact else float(large)}
    assert isinstance(value["large"], int if exact else float)


def test_hidden_commas_do_not_make_a_text_exceed_the_limit_of_values() -> None:
    # No comma is at a position that the estimate of their number looks at.
    text = b"[ " + b"1,11111," * (MIN_LARGE_BYTES // 8 + 1) + b"1]"
    assert bodies._estimate_commas(text) < text.count(b",") / 2
    assert loads(text) == parse_json(text)
    with pytest.raises(TooComplex):
        loads(text, text.count(b",") - 100)


@pytest.mark.slow
@given(value=JSON, indent=st.sampled_from([None, 1]), piece=st.sampled_from([1, 3, 16, 80]), data=st.data())
def test_a_text_in_chunks_is_accepted_or_rejected_like_the_whole_text(
    value: object, indent: int | None, piece: int, data: st.DataObject
) -> None:
    text = json.dumps(value, ensure_ascii=False, indent=indent).encode()
    for _ in range(data.draw(st.integers(0, 2))):
        at = data.draw(st.integers(0, len(text)))
        put = data.draw(st.sampled_from([b"", b",", b"[", b"]", b"{", b"}", b'"', b":", b" ", b"\\", b"1"]))
        text = text[:at] + put + text[at + (not put) :]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "MIN_LARGE_BYTES", 0)
        patch.setattr(bodies, "PIECE_BYTES", piece)
        patch.setattr(bodies, "MAX_WHOLE_BYTES", 0)
        patch.setattr(bodies, "_NEAR_BYTES", 2)
        assert read(text, loads) == read(text, parse_json)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        b'{"x":[' + b"[]," * 400_000 + b"0]}",
        b'{"x":[' + b'{"a":[{}]},' * 200_000 + b"0]}",
        b"[" + b"0," * 9_000_000 + b"0]",
        b'{"x":"' + b"," * 9_000_000 + b'","y":[' + b"0," * 8_388_608 + b"0]}",
    ],
)
async def test_too_many_values_are_rejected(text: bytes) -> None:
    with pytest.raises(TooComplex, match="too many values"):
        await loads_async(text, 8 * 2**20)


@pytest.mark.slow
def test_text_inside_strings_does_not_count_as_values() -> None:
    text = json.dumps({"code": 'x = [{"a": [1, 2]}, {}]\n' * 200_000}).encode()
    assert loads(text, VALUES_PER_CONTAINER + 1) == parse_json(text)


@pytest.mark.parametrize("size", [0, MIN_LARGE_BYTES])
def test_too_deep_nesting_is_rejected(size: int) -> None:
    padding = b'"' + b"a" * size + b'"'
    assert loads(b"[%s,%s]" % (padding, b"[" * 1000 + b"]" * 1000))
    with pytest.raises(ValueError, match=r"nested more than 1024 levels|depth (limit|exceeded)"):
        loads(b"[%s,%s]" % (padding, b"[" * 1100 + b"]" * 1100))


@pytest.mark.slow
@pytest.mark.parametrize("max_whole_bytes", [0, bodies.MAX_WHOLE_BYTES])
def test_long_lists_of_numbers_are_parsed_whole_and_in_pieces(
    max_whole_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "MAX_WHOLE_BYTES", max_whole_bytes)
    ids, logprobs = list(range(100_000, 165_536)), [-number / 7 for number in range(65_536)]
    turn = {"type": "message", "content": 'a "quoted" [text]', "token_ids": ids, "log_probs": logprobs}
    text = json.dumps({"output": [{"type": "reasoning"}, turn], "usage": {"tokens": [[], [1]]}}).encode()
    assert len(text) > 2 * bodies.PIECE_BYTES
    assert loads(text) == json.loads(text)


@pytest.mark.slow
async def test_a_transcript_with_many_long_turns_is_accepted() -> None:
    turn = {"ids": list(range(65_536)), "log_probs": [-0.5] * 65_536}
    text = json.dumps({"output": [turn] * 20}).encode()
    assert await loads_async(text) == {"output": [turn] * 20}
