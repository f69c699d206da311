"""Load tokenizers: objects, names and the built-in byte tokenizer; templates may return ids in several formats."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymsdk.errors import UsageError
from gymsdk.tokens import chatml
from gymsdk.tokens import tokenizer as tokenizers
from gymsdk.tokens.chatml import SpecialToken
from gymsdk.tokens.tokenizer import ByteTokenizer, load_tokenizer, render_messages

from .fake_tokenizers import CHATML, STYLES, FakeTokenizer

MESSAGES = [{"role": "user", "content": "go"}]


def test_the_default_is_the_byte_tokenizer_and_another_object_is_returned_unchanged(monkeypatch):
    assert isinstance(load_tokenizer(), ByteTokenizer)
    tokenizer, _ = STYLES["qwen"]
    assert load_tokenizer(tokenizer) is tokenizer
    with pytest.raises(UsageError, match="int is not a tokenizer"):
        load_tokenizer(7)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match="pip install transformers"):
        load_tokenizer("some/model")


@pytest.fixture
def transformers(monkeypatch):
    """Replace the transformers library with a fake that has one model and records each request."""
    requested = []

    def from_pretrained(name):
        requested.append(name)
        if name != "known/model":
            raise OSError(f"{name} is not there\nand much more")
        return STYLES["qwen"][0]

    module = ModuleType("transformers")
    module.AutoTokenizer = SimpleNamespace(from_pretrained=from_pretrained)
    monkeypatch.setitem(sys.modules, "transformers", module)
    return requested


def test_the_tokenizer_of_a_model_is_loaded_once_and_a_missing_one_reported_in_one_sentence(transformers):
    assert load_tokenizer("known/model") is load_tokenizer("known/model") is STYLES["qwen"][0]
    assert transformers == ["known/model"]
    with pytest.raises(UsageError, match=r"cannot load a tokenizer from 'lost/model'.*: lost/model is not there$"):
        load_tokenizer("lost/model")


def test_ids_are_found_in_a_mapping_and_errors_of_a_template_are_one_sentence():
    plain, mapping = STYLES["chatml"][0], STYLES["chatml in a mapping"][0]
    assert render_messages(mapping, MESSAGES) == render_messages(plain, MESSAGES)
    text = FakeTokenizer(lambda *_: "text", CHATML, "<|im_end|>")
    text.encode = lambda text: text
    for tokenizer, role, message in (
        (text, "user", "must return a list of token ids, got str"),
        (STYLES["gemma"][0], "system", "cannot render these messages: no system role"),
        (load_tokenizer(), "judge", r"^unknown role 'judge' of a chat message"),
    ):
        with pytest.raises(UsageError, match=message):
            render_messages(tokenizer, [{"role": role, "content": "go"}])


def read_metadata(tokenizer):
    tokens = tokenizers.get_special_tokens(tokenizer)
    return tokenizers.get_vocab_size(tokenizer), tokenizers.get_eos_id(tokenizer), set(tokens.values())


def test_the_metadata_of_a_tokenizer_is_read_and_missing_metadata_is_none_or_empty():
    class MinimalTokenizer:
        apply_chat_template = encode = decode = None

    special = {"<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"}
    assert read_metadata(STYLES["gemma"][0]) == (1004, 1001, special)
    assert read_metadata(MinimalTokenizer()) == (None, None, set())


BYTES = ByteTokenizer()
END = BYTES.eos_token_id

prose = st.text(st.characters(exclude_categories=["Cs"]))


@settings(deadline=None, max_examples=50)
@given(prose, st.lists(st.integers(0, 258)))
def test_text_survives_the_round_trip_and_any_ids_can_be_decoded(text, ids):
    assert BYTES.decode(BYTES.encode(text)) == text
    assert isinstance(BYTES.decode(ids), str)
    assert len(BYTES) == BYTES.vocab_size == 259


def test_invalid_text_is_replaced():
    assert BYTES.decode([0x68, 0xFF, END]) == "h\N{REPLACEMENT CHARACTER}<|im_end|>"
    assert BYTES.encode("a\ud800b") == [*b"a?b"]


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


@pytest.mark.parametrize("wrong", [-1, 259, 10**9])
def test_an_id_out_of_range_is_named(wrong):
    with pytest.raises(UsageError, match=f"token id {wrong} is out of range; token ids go from 0 to 258"):
        BYTES.decode([65, wrong])
