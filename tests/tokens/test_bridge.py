"""The bridge returns exactly the text that the template writes after a generation."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymsdk.errors import UsageError
from gymsdk.gym.codecs import Tokens, once
from gymsdk.testing.templates import TEMPLATES, TemplateTokenizer
from gymsdk.tokens.bridge import Bridge, BridgeError, TemplateBridge, TokenizerSteps, answer_from_tokenizer
from gymsdk.tokens.tokenizer import ByteTokenizer, Tokenizer
from gymsdk.types import Item

from .jinja_templates import JinjaTokenizer

ANSWER = "ANSWER"
BYTES = ByteTokenizer()
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
TOKENIZERS = {name: TemplateTokenizer(template, pairs=True) for name, template in TEMPLATES.items()}
QUESTION: Item = {"role": "user", "content": "see door"}

words = st.text(st.sampled_from("thenio \n\"}]<>{'é答😀"), max_size=12)
ids = st.lists(st.integers(0, 255), max_size=12)


def render_after(tokenizer: TemplateTokenizer, turn: Item, messages: list[Item]) -> str:
    """Return the text that the template writes after *turn*, which ends with ANSWER, in a long conversation."""
    earlier = [
        QUESTION,
        {"role": "assistant", "content": "<think>\nwhy\n</think>\n\nsome words"},
        {"role": "user", "content": "once more"},
    ]
    written = tokenizer.apply_chat_template([*earlier, turn, *messages], tools=TOOLS, add_generation_prompt=True)
    text = tokenizer.decode(written)
    return text[text.rindex(ANSWER) :].partition(tokenizer.template.eos)[2]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(deadline=None, max_examples=30)
@given(texts=st.lists(words, max_size=3), has_calls=st.booleans(), generated=ids, is_truncated=st.booleans())
def test_the_suffix_equals_the_text_of_the_template(
    name: str, texts: list[str], has_calls: bool, generated: list[int], is_truncated: bool
) -> None:
    """After a reply, a message of the user or nothing follows; after calls, their outputs follow."""
    tokenizer = TOKENIZERS[name]
    bridge = Bridge(tokenizer, TOOLS)
    assert bridge.terminator == tokenizer.eos_token_id
    function = {"name": "look", "arguments": {"at": ANSWER}}
    numbered = [(f"call_0_{number}", text) for number, text in enumerate(texts)]
    calls = [{"id": call, "type": "function", "function": function} for call, _ in numbered] if has_calls else []
    outputs = [{"role": "tool", "tool_call_id": call, "content": text} for call, text in numbered]
    new = outputs if calls else [{"role": "user", "content": text} for text in texts[:1]]
    turn = {"role": "assistant", "content": "" if calls else ANSWER, "tool_calls": calls}
    # A turn with calls is complete: the end of a call is a part of what the policy writes.
    end = [] if is_truncated and not calls else [bridge.terminator]
    suffix = bridge.suffix([*generated, *end], new, calls=calls)
    assert tokenizer.decode(suffix) == ("" if end else tokenizer.template.eos) + render_after(tokenizer, turn, new)


def test_a_line_break_is_not_repeated_and_an_empty_generation_is_terminated_too() -> None:
    bridge, new = Bridge(BYTES), [{"role": "user", "content": "bye"}]
    generated = [*b"words", BYTES.eos_token_id]
    assert bridge.suffix([*generated, 10], new) == bridge.suffix(generated, new)[1:]
    assert bridge.suffix([], new)[0] == bridge.terminator
    # Without a generation prompt, no turn starts.
    suffix = bridge.suffix([65], new, add_generation_prompt=False)
    assert BYTES.decode(suffix) == "<|im_end|>\n<|im_start|>user\nbye<|im_end|>\n"


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        ("{{ message.content }}\n\n", "ends an assistant turn without a special token"),
        (
            "{% if message.role != 'assistant' %}{{ message.content }}<|im_end|>{% endif %}",
            "leaves out an assistant turn",
        ),
        ("{{ raise_exception('no system role') }}", "the chat template rejects the messages: no system role"),
        ("{{ message.content }}{{ '<|return|>' if loop.last else '<|im_end|>' }}", "in another way"),
    ],
)
def test_a_template_that_does_not_determine_the_ids_is_rejected(turn: str, message: str) -> None:
    tokenizer = JinjaTokenizer(f"{{% for message in messages %}}{turn}{{% endfor %}}")
    with pytest.raises(BridgeError, match=message):
        Bridge(tokenizer).suffix([65, 66], [{"role": "system", "content": "go on"}])


def run(steps: TokenizerSteps[list[int]], tokenizer: Tokenizer) -> list[int]:
    result: object = None
    while True:
        try:
            request = steps.send(result)
        except StopIteration as stop:
            ids: list[int] = stop.value
            return ids
        result = answer_from_tokenizer(tokenizer, request, None)


MESSAGES = [QUESTION, *({"role": role, "content": "then another one"} for role in ("assistant", "user", "assistant"))]
NEW: list[Item] = [{"role": "user", "content": "door see"}]


@pytest.mark.parametrize("name", ["chatml", "gemma", "mistral", "eos-only"])
@pytest.mark.parametrize("is_truncated", [False, True])
def test_counting_turns_gives_the_same_ids_as_the_placeholder(name: str, is_truncated: bool) -> None:
    tokenizer = TOKENIZERS[name]
    end = tokenizer.eos_token_id
    generated = [*tokenizer.encode("other words"), *([] if is_truncated else [end])]
    expected = run(TemplateBridge([end]).compute_suffix(generated, NEW), tokenizer)
    assert run(TemplateBridge([end]).count_suffix(generated, MESSAGES, NEW), tokenizer) == expected
    # Where the special tokens are not known, the last id of a complete turn ends it.
    counted = TemplateBridge().count_suffix(generated, MESSAGES, NEW)
    if not is_truncated:
        assert run(counted, tokenizer) == expected
    else:
        with pytest.raises(BridgeError, match="without a special token"):
            run(counted, tokenizer)


def test_a_turn_that_the_template_writes_in_another_way_later_is_not_counted() -> None:
    tokenizer = TOKENIZERS["qwen"]
    with pytest.raises(BridgeError, match="in another way"):
        run(TemplateBridge([tokenizer.eos_token_id]).count_suffix([65, 258], MESSAGES, NEW), tokenizer)


class WordTokenizer:
    """A tokenizer with words as ids; id 0 is any other word. Its chat template writes a turn between two marks."""

    def __init__(self, words: Sequence[str], *, has_vocabulary: bool = True) -> None:
        self.words = ["<unk>", "<end>", "<start>", *words]
        self.eos_token_id = 1
        if has_vocabulary:
            self.get_vocab = lambda: {word: number for number, word in enumerate(self.words)}

    def apply_chat_template(
        self, messages: list[Item], /, *, tools: list[Item] | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        text = "".join(f"<start> {message['role']} {message['content']} <end> " for message in messages)
        return self.encode(text + ("<start> assistant" if add_generation_prompt else ""))

    def encode(self, text: str, /, *, add_special_tokens: bool = False) -> list[int]:
        return [self.words.index(word) if word in self.words else 0 for word in re.findall(r"\S+", text)]

    def decode(self, ids: list[int], /) -> str:
        return " ".join(self.words[number] for number in ids)


def continue_turn(tokenizer: Any, turn: str) -> str:
    generated = tokenizer.encode(f"{turn} <end>")
    conversation = [QUESTION, {"role": "assistant", "content": turn}]
    return str(tokenizer.decode(Bridge(tokenizer).suffix(generated, NEW, conversation=conversation)))


@pytest.mark.parametrize(("has_vocabulary", "turn"), [(True, "gold"), (False, "gold map")])
def test_placeholder_words_come_from_the_vocabulary_or_else_from_the_conversation(
    has_vocabulary: bool, turn: str
) -> None:
    tokenizer = WordTokenizer(("user", "assistant", "see", "door", "gold", "map"), has_vocabulary=has_vocabulary)
    assert continue_turn(tokenizer, turn) == "<start> user door see <end> <start> assistant"
    assert not has_vocabulary or Bridge(tokenizer).terminator == tokenizer.eos_token_id


def test_a_tokenizer_that_knows_no_words_is_explained_once(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = WordTokenizer(())
    with pytest.raises(BridgeError, match=r"turns different words .* use a tokenizer whose vocabulary covers"):
        continue_turn(tokenizer, "gold")
    once.warnings.clear()
    with caplog.at_level(logging.WARNING, logger="gymsdk"):
        for _ in range(3):
            codec = Tokens(tokenizer)
            codec.encode_opening([QUESTION], [])
            # A turn that was cut off: what follows it is not there as it was generated.
            codec.parse_action([0], turn=0)
            with pytest.raises(UsageError, match="turns different words"):
                codec.encode_reply(NEW, over=False)
    [said] = [record.getMessage() for record in caplog.records]
    assert "episodes of several turns may fail with this tokenizer" in said
