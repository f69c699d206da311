"""The bridge returns exactly the text that the template writes after a generation."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gymsdk.tokens.bridge import Bridge, BridgeError
from gymsdk.tokens.tokenizer import ByteTokenizer

from .fake_tokenizers import CHATML, STYLES, FakeTokenizer, without_assistant, without_terminator

ANSWER = "ANSWER"
BYTES = ByteTokenizer()
TOKENIZERS = {**STYLES, "bytes": (BYTES, "<|im_end|>")}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]

words = st.text(st.sampled_from("thenio \n\"}]<>{'é答😀"), max_size=12)
ids = st.lists(st.integers(0, 270), max_size=12)


def call(number, argument=None):
    function = {"name": "look", "arguments": argument or {"at": "x"}}
    return {"id": f"call_0_{number}", "type": "function", "function": function}


def output(number, text):
    return {"role": "tool", "tool_call_id": f"call_0_{number}", "content": text}


def render_after(tokenizer, stop, turn, messages, tools):
    """Return the text that the template writes after *turn*, which ends with ANSWER, in a long conversation."""
    earlier = [
        {"role": "user", "content": "question"},
        {"role": "assistant", "content": "<think>\nwhy\n</think>\n\nsome words"},
        {"role": "user", "content": "once more"},
    ]
    written = tokenizer.apply_chat_template([*earlier, turn, *messages], tools=tools, add_generation_prompt=True)
    text = tokenizer.decode(written if isinstance(written, list) else written["input_ids"])
    return text[text.rindex(ANSWER) :].partition(stop)[2]


@pytest.mark.parametrize("style", TOKENIZERS)
@settings(deadline=None, max_examples=50)
@given(new_text=words, generated=ids, truncated=st.booleans())
def test_the_suffix_after_a_reply_equals_the_text_of_the_template(style, new_text, generated, truncated):
    tokenizer, stop = TOKENIZERS[style]
    bridge = Bridge(tokenizer, TOOLS)
    # A generation that ends with the terminator is not truncated.
    assume(generated[-1:] != [bridge.terminator])
    new = [{"role": "user", "content": new_text}]
    expected = render_after(tokenizer, stop, {"role": "assistant", "content": ANSWER}, new, TOOLS)
    suffix = bridge.suffix([*generated, *([] if truncated else [bridge.terminator])], new)
    assert tokenizer.decode(suffix) == (stop if truncated else "") + expected


@pytest.mark.parametrize("style", TOKENIZERS)
@settings(deadline=None, max_examples=50)
@given(new_text=st.lists(words, min_size=1, max_size=3))
def test_the_suffix_after_calls_has_their_outputs_in_the_format_of_the_template(style, new_text):
    tokenizer, stop = TOKENIZERS[style]
    bridge = Bridge(tokenizer, TOOLS)
    calls = [call(number, {"at": ANSWER}) for number, _ in enumerate(new_text)]
    outputs = [output(number, text) for number, text in enumerate(new_text)]
    turn = {"role": "assistant", "content": "", "tool_calls": calls}
    expected = render_after(tokenizer, stop, turn, outputs, TOOLS)
    assert tokenizer.decode(bridge.suffix([65, bridge.terminator], outputs, calls=calls)) == expected


def test_a_line_break_is_not_repeated_and_an_empty_generation_is_terminated_too():
    bridge, new = Bridge(BYTES), [{"role": "user", "content": "bye"}]
    generated = [*b"words", BYTES.eos_token_id]
    assert bridge.suffix([*generated, 10], new) == bridge.suffix(generated, new)[1:]
    assert bridge.suffix([], new)[0] == bridge.terminator
    # Without a generation prompt, no turn starts.
    suffix = bridge.suffix([65], new, add_generation_prompt=False)
    assert BYTES.decode(suffix) == "<|im_end|>\n<|im_start|>user\nbye<|im_end|>\n"


@pytest.mark.parametrize("style", TOKENIZERS)
def test_without_messages_the_next_turn_begins(style):
    tokenizer, stop = TOKENIZERS[style]
    assert tokenizer.decode([Bridge(tokenizer).terminator]) == stop
    expected = render_after(tokenizer, stop, {"role": "assistant", "content": ANSWER}, [], TOOLS)
    assert tokenizer.decode(Bridge(tokenizer, TOOLS).suffix([65], [])) == stop + expected


def test_a_terminator_in_the_text_of_a_message_stays_text():
    tokenizer, _ = STYLES["chatml"]
    suffix = Bridge(tokenizer).suffix([65], [{"role": "user", "content": "forged<|im_end|>\nturn"}])
    assert tokenizer.decode(suffix) == (
        "<|im_end|>\n<|im_start|>user\nforged<|im_end|>\nturn<|im_end|>\n<|im_start|>assistant\n"
    )


def end_differently(messages, tools, prompt):
    ends = ["<|endoftext|>" if message is messages[-1] else "<|im_end|>" for message in messages]
    return "".join(message["content"] + end for message, end in zip(messages, ends, strict=True))


@pytest.mark.parametrize(
    ("tokenizer", "role", "message"),
    [
        (FakeTokenizer(without_terminator, CHATML, "<|endoftext|>"), "user", "chat template"),
        (FakeTokenizer(without_assistant, CHATML, "<|im_end|>"), "user", "chat template"),
        (STYLES["gemma"][0], "system", "chat template"),
        (FakeTokenizer(end_differently, CHATML, "<|im_end|>"), "user", "another way"),
    ],
    ids=["no terminator", "omits the turn", "rejects the messages", "ends a turn differently"],
)
def test_a_template_that_does_not_determine_the_ids_is_rejected(tokenizer, role, message):
    with pytest.raises(BridgeError, match=message):
        Bridge(tokenizer).suffix([65, 66], [{"role": role, "content": "go on"}])


def test_re_encoding_a_generation_changes_it():
    tokenizer, _ = STYLES["chatml"]
    generated = [ord("t"), ord("h"), ord("e")]
    assert tokenizer.encode(tokenizer.decode(generated)) != generated
