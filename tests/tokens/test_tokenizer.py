"""Tokenizers as objects, by name, and built in; templates may return ids in several forms."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from gymsdk.errors import UsageError
from gymsdk.tokens import tokenizer as tokenizers
from gymsdk.tokens.tokenizer import ByteTokenizer, load_tokenizer, render_messages

from .made import CHATML, STYLES, Made

ASKED = [{"role": "user", "content": "go"}]


def test_none_is_the_tokenizer_of_bytes():
    assert isinstance(load_tokenizer(), ByteTokenizer)


def test_a_tokenizer_object_is_returned_unchanged():
    made, _ = STYLES["qwen"]
    assert load_tokenizer(made) is made


def test_an_object_that_is_not_a_tokenizer_is_rejected():
    with pytest.raises(UsageError, match="int is not a tokenizer"):
        load_tokenizer(7)


def test_a_name_without_transformers_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match="pip install transformers"):
        load_tokenizer("some/model")


@pytest.fixture
def transformers(monkeypatch):
    """A stand-in for the library, which knows one model and counts how often it is asked."""
    asked = []

    def found(name):
        asked.append(name)
        if name != "known/model":
            raise OSError(f"{name} is not there\nand much more")
        return STYLES["qwen"][0]

    module = ModuleType("transformers")
    module.AutoTokenizer = SimpleNamespace(from_pretrained=found)
    monkeypatch.setitem(sys.modules, "transformers", module)
    return asked


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
    plain, boxed = STYLES["chatml"][0], STYLES["chatml boxed"][0]
    assert render_messages(boxed, ASKED) == render_messages(plain, ASKED)


def test_a_failing_template_is_reported_in_one_sentence():
    with pytest.raises(UsageError, match="cannot render these messages: no system role"):
        render_messages(STYLES["gemma"][0], [{"role": "system", "content": "be good"}])


def test_a_template_that_returns_text_is_rejected():
    made = Made(lambda *_: "text", CHATML, "<|im_end|>")
    made.encode = lambda text: text
    with pytest.raises(UsageError, match="must return a list of token ids, got str"):
        render_messages(made, ASKED)


def test_what_a_tokenizer_tells_of_itself_is_read():
    made, _ = STYLES["gemma"]
    assert (tokenizers.get_vocab_size(made), tokenizers.get_eos_id(made)) == (1004, 1001)
    assert set(tokenizers.get_special_tokens(made).values()) == {"<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"}


def test_what_it_does_not_tell_is_not_made_up():
    class Silent:
        apply_chat_template = encode = decode = None

    silent = Silent()
    assert (
        tokenizers.get_vocab_size(silent),
        tokenizers.get_eos_id(silent),
        tokenizers.get_special_tokens(silent),
    ) == (None, None, {})
