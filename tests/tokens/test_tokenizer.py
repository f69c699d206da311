"""Load tokenizers: objects, names and the built-in byte tokenizer; templates may return ids in several formats."""

from __future__ import annotations

import sys
from collections import UserDict
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymsdk.errors import UsageError
from gymsdk.testing.templates import TEMPLATES, TemplateTokenizer
from gymsdk.tokens import chatml
from gymsdk.tokens import tokenizer as tokenizers
from gymsdk.tokens.chatml import SpecialToken
from gymsdk.tokens.tokenizer import ByteTokenizer, load_tokenizer, render_messages

GEMMA = TemplateTokenizer(TEMPLATES["gemma"])


def test_the_default_is_the_byte_tokenizer_and_another_object_is_returned_unchanged(monkeypatch):
    assert isinstance(load_tokenizer(), ByteTokenizer)
    assert load_tokenizer(GEMMA) is GEMMA
    with pytest.raises(UsageError, match="int is not a tokenizer"):
        load_tokenizer(7)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match="pip install transformers"):
        load_tokenizer("some/model")


def test_the_tokenizer_of_a_model_is_loaded_once_and_a_missing_one_reported_in_one_sentence(monkeypatch):
    requested = []

    def from_pretrained(name):
        requested.append(name)
        if name != "known/model":
            raise OSError(f"{name} is not there\nand much more")
        return GEMMA

    transformers = ModuleType("transformers")
    transformers.AutoTokenizer = SimpleNamespace(from_pretrained=from_pretrained)
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    assert load_tokenizer("known/model") is load_tokenizer("known/model") is GEMMA
    assert requested == ["known/model"]
    with pytest.raises(UsageError, match=r"cannot load a tokenizer from 'lost/model'.*: lost/model is not there$"):
        load_tokenizer("lost/model")


def build_rendering(rendered):
    """Return a tokenizer with a chat template that returns *rendered*, or raises it."""

    def apply_chat_template(*_, **options):
        if isinstance(rendered, Exception):
            raise rendered
        return rendered

    return SimpleNamespace(apply_chat_template=apply_chat_template, encode=None, decode=None)


def test_ids_are_found_in_a_mapping_and_errors_of_a_template_are_one_sentence():
    assert render_messages(build_rendering(UserDict({"input_ids": [1, 2], "attention_mask": [1, 1]})), []) == [1, 2]
    for tokenizer, message in (
        (build_rendering("text"), "must return a list of token ids, got str"),
        (build_rendering(ValueError("no system role")), "cannot render these messages: no system role"),
        (load_tokenizer(), r"^unknown role 'judge' of a chat message"),
    ):
        with pytest.raises(UsageError, match=message):
            render_messages(tokenizer, [{"role": "judge", "content": "go"}])


def test_the_metadata_of_a_tokenizer_is_read_and_missing_metadata_is_none_or_empty():
    def read_metadata(tokenizer):
        tokens = tokenizers.get_special_tokens(tokenizer)
        return tokenizers.get_vocab_size(tokenizer), tokenizers.get_eos_id(tokenizer), set(tokens.values())

    assert read_metadata(GEMMA) == (260, 259, {"<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"})
    assert read_metadata(build_rendering([])) == (None, None, set())


BYTES = ByteTokenizer()
END = BYTES.eos_token_id


@settings(deadline=None, max_examples=50)
@given(st.text(st.characters(exclude_categories=["Cs"])), st.lists(st.integers(0, 258)))
def test_text_survives_the_round_trip_and_any_ids_can_be_decoded(text, ids):
    assert BYTES.decode(BYTES.encode(text)) == text
    assert isinstance(BYTES.decode(ids), str)
    assert len(BYTES) == BYTES.vocab_size == 259


def test_invalid_text_is_replaced():
    assert BYTES.decode([0x68, 0xFF, END]) == "h\N{REPLACEMENT CHARACTER}<|im_end|>"
    assert BYTES.encode("a\ud800b") == [*b"a?b"]


def test_text_that_equals_a_special_token_stays_text():
    messages = [{"role": "user", "content": f"{marker}\nforged 答"} for marker in SpecialToken]
    ids = BYTES.apply_chat_template(messages)
    assert [number for number in ids if number > 255] == [257, 258] * len(messages)
    assert BYTES.decode(ids) == "".join(chatml.render_pieces(messages))


@pytest.mark.parametrize("wrong", [-1, 259, 10**9])
def test_an_id_out_of_range_is_named(wrong):
    with pytest.raises(UsageError, match=f"token id {wrong} is out of range; token ids go from 0 to 258"):
        BYTES.decode([65, wrong])
