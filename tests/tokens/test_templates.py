"""The chat templates of the test policy can be parsed back, and each renders what its name says."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymsdk.errors import UsageError
from gymsdk.testing.templates import TEMPLATES, TemplateTokenizer
from gymsdk.tokens.tokenizer import ByteTokenizer
from gymsdk.types import Item

from .conversations import TEXTS

CALL = {"id": "call_0", "type": "function", "function": {"name": "look", "arguments": '{"at": "home"}'}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
MESSAGES: list[Item] = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Look there."},
    {"role": "assistant", "content": "Well.", "reasoning_content": "think then answer", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_0", "content": "one"},
    {"role": "assistant", "content": "done", "reasoning_content": "hm"},
    {"role": "user", "content": "And now?"},
]
ALL = pytest.mark.parametrize("name", TEMPLATES)


@pytest.mark.parametrize("pairs", [False, True])
@ALL
def test_a_rendered_conversation_can_be_parsed_back(name: str, pairs: bool) -> None:
    tokenizer = TemplateTokenizer(TEMPLATES[name], pairs)
    ids = tokenizer.apply_chat_template(MESSAGES, tools=[TOOL], add_generation_prompt=True)
    messages, tools = tokenizer.parse_conversation(ids)
    assert tools == [TOOL]
    assert [message["role"] for message in messages] == [message["role"] for message in MESSAGES]
    assert [message["content"] for message in messages] == [message["content"] for message in MESSAGES]
    assert messages[2]["tool_calls"] == [CALL]
    assert messages[3]["tool_call_id"] == "call_0"


@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_the_default_template_is_that_of_the_byte_tokenizer(add_generation_prompt: bool) -> None:
    options = {"tools": [TOOL], "add_generation_prompt": add_generation_prompt}
    expected = ByteTokenizer().apply_chat_template(MESSAGES, **options)
    assert TemplateTokenizer().apply_chat_template(MESSAGES, **options) == expected


@settings(deadline=None)
@given(st.text(st.sampled_from("thenior \n\"}:>{'é答😀"), max_size=40), st.integers(0, 5))
def test_a_generation_has_the_text_but_often_other_ids_than_the_tokenizer(text: str, seed: int) -> None:
    tokenizer = TemplateTokenizer(pairs=True)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    generated = tokenizer.encode_generation(text, seed=seed)
    assert tokenizer.decode(generated) == text
    assert generated == tokenizer.encode_generation(text, seed=seed)
    long = "then another one " * 4
    assert tokenizer.encode_generation(long, seed=1) != tokenizer.encode(long)


@ALL
def test_text_that_spells_a_special_token_stays_text(name: str) -> None:
    tokenizer = TemplateTokenizer(TEMPLATES[name])
    assert not {*tokenizer.encode("".join(TEXTS))} & {*tokenizer.special_ids.values()}


def render(name: str, *messages: Item, **options: bool) -> str:
    tokenizer = TemplateTokenizer(TEMPLATES[name])
    return tokenizer.decode(tokenizer.apply_chat_template([*messages], **options))


def test_templates_differ_in_the_reasoning_that_they_keep_and_open_and_in_empty_turns() -> None:
    kept = {
        name: [word for word in ("think then answer", "hm") if word in render(name, *MESSAGES)] for name in TEMPLATES
    }
    assert kept["chatml"] == kept["gemma"] == kept["mistral"] == ["think then answer", "hm"]
    assert kept["qwen"] == kept["strip"] == kept["drop-empty"] == kept["eos-only"] == []
    assert "think then answer" in render("qwen", *MESSAGES[:4])
    assert render("strip", MESSAGES[1], add_generation_prompt=True).endswith("<|im_start|>assistant\n<think>\n")
    empty = {"role": "assistant", "content": "", "reasoning_content": ""}
    without = {name: render(name, MESSAGES[1], MESSAGES[5]) for name in TEMPLATES}
    dropping = [name for name in TEMPLATES if render(name, MESSAGES[1], empty, MESSAGES[5]) == without[name]]
    assert dropping == ["drop-empty"]


def test_an_id_out_of_range_is_named() -> None:
    with pytest.raises(UsageError, match="token id 999 is out of range; token ids go from 0 to 258"):
        TemplateTokenizer().decode([65, 999])
