"""Load tokenizers: objects, names and the built-in byte tokenizer; templates may return ids in several formats."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from gymsdk.errors import UsageError
from gymsdk.tokens import tokenizer as tokenizers
from gymsdk.tokens.tokenizer import ByteTokenizer, load_tokenizer, render_messages

from .fake_tokenizers import CHATML, STYLES, FakeTokenizer

MESSAGES = [{"role": "user", "content": "go"}]


def test_the_default_is_the_byte_tokenizer():
    assert isinstance(load_tokenizer(), ByteTokenizer)


def test_a_tokenizer_object_is_returned_unchanged():
    tokenizer, _ = STYLES["qwen"]
    assert load_tokenizer(tokenizer) is tokenizer


def test_an_object_that_is_not_a_tokenizer_is_rejected():
    with pytest.raises(UsageError, match="int is not a tokenizer"):
        load_tokenizer(7)


def test_missing_transformers_is_reported_with_the_install_command(monkeypatch):
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


def test_the_tokenizer_of_a_model_is_loaded_once(transformers):
    assert load_tokenizer("known/model") is load_tokenizer("known/model") is STYLES["qwen"][0]
    assert transformers == ["known/model"]


def test_a_missing_model_is_reported_in_one_sentence(transformers):
    with pytest.raises(UsageError, match=r"cannot load a tokenizer from 'lost/model'.*: lost/model is not there$"):
        load_tokenizer("lost/model")


def test_an_error_about_the_messages_is_unchanged():
    with pytest.raises(UsageError, match=r"^unknown role 'judge' of a chat message"):
        render_messages(load_tokenizer(), [{"role": "judge", "content": "guilty"}])


def test_ids_in_a_mapping_are_found():
    plain, mapping = STYLES["chatml"][0], STYLES["chatml in a mapping"][0]
    assert render_messages(mapping, MESSAGES) == render_messages(plain, MESSAGES)


def test_a_failing_template_is_reported_in_one_sentence():
    with pytest.raises(UsageError, match="cannot render these messages: no system role"):
        render_messages(STYLES["gemma"][0], [{"role": "system", "content": "be good"}])


def test_a_template_that_returns_text_is_rejected():
    tokenizer = FakeTokenizer(lambda *_: "text", CHATML, "<|im_end|>")
    tokenizer.encode = lambda text: text
    with pytest.raises(UsageError, match="must return a list of token ids, got str"):
        render_messages(tokenizer, MESSAGES)


def test_tokenizer_metadata_is_read():
    tokenizer, _ = STYLES["gemma"]
    assert (tokenizers.get_vocab_size(tokenizer), tokenizers.get_eos_id(tokenizer)) == (1004, 1001)
    assert set(tokenizers.get_special_tokens(tokenizer).values()) == {
        "<bos>",
        "<eos>",
        "<start_of_turn>",
        "<end_of_turn>",
    }


def test_missing_tokenizer_metadata_is_none_or_empty():
    class MinimalTokenizer:
        apply_chat_template = encode = decode = None

    minimal = MinimalTokenizer()
    assert (
        tokenizers.get_vocab_size(minimal),
        tokenizers.get_eos_id(minimal),
        tokenizers.get_special_tokens(minimal),
    ) == (None, None, {})
