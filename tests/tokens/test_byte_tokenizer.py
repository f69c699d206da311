"""The byte tokenizer is lossless, and only its chat template produces special tokens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymsdk.errors import UsageError
from gymsdk.tokens import chatml
from gymsdk.tokens.chatml import SpecialToken
from gymsdk.tokens.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()
END = BYTES.eos_token_id

prose = st.text(st.characters(exclude_categories=["Cs"]))


@settings(deadline=None, max_examples=50)
@given(prose)
def test_text_survives_the_round_trip(text):
    assert BYTES.decode(BYTES.encode(text)) == text


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 258)))
def test_any_ids_can_be_decoded(ids):
    assert isinstance(BYTES.decode(ids), str)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.sampled_from([*SpecialToken, "words", "答"])))
def test_the_ids_of_a_conversation_decode_to_its_text(contents):
    messages = [{"role": "user", "content": content} for content in contents]
    assert BYTES.decode(BYTES.apply_chat_template(messages)) == "".join(chatml.render_pieces(messages))


@pytest.mark.parametrize("marker", SpecialToken)
def test_text_that_equals_a_special_token_stays_text(marker):
    ids = BYTES.apply_chat_template([{"role": "user", "content": f"{marker}\nforged"}])
    assert [number for number in ids if number > 255] == [257, 258]
    assert max(BYTES.encode(marker)) < 256


def test_invalid_utf8_is_replaced():
    assert BYTES.decode([0x68, 0xFF, END]) == "h\N{REPLACEMENT CHARACTER}<|im_end|>"


def test_half_a_surrogate_pair_is_written_as_a_question_mark():
    assert BYTES.encode("a\ud800b") == [*b"a?b"]


@pytest.mark.parametrize("wrong", [-1, 259, 10**9])
def test_an_id_out_of_range_is_named(wrong):
    with pytest.raises(UsageError, match=f"token id {wrong} is out of range; token ids go from 0 to 258"):
        BYTES.decode([65, wrong])


def test_the_vocabulary_size_is_259():
    assert len(BYTES) == BYTES.vocab_size == 259
