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


@pytest.mark.parametrize(("style", "stop"), [(style, stop) for style, (_, stop) in TOKENIZERS.items()])
def test_the_terminator_is_detected(style, stop):
    tokenizer, _ = TOKENIZERS[style]
    assert tokenizer.decode([Bridge(tokenizer).terminator]) == stop


def test_a_line_break_that_the_policy_generated_is_not_repeated():
    bridge, new = Bridge(BYTES), [{"role": "user", "content": "go on"}]
    generated = [*b"words", BYTES.eos_token_id]
    assert bridge.suffix([*generated, 10], new) == bridge.suffix(generated, new)[1:]


@pytest.mark.parametrize("style", TOKENIZERS)
def test_without_messages_the_next_turn_begins(style):
    tokenizer, stop = TOKENIZERS[style]
    expected = render_after(tokenizer, stop, {"role": "assistant", "content": ANSWER}, [], TOOLS)
    assert tokenizer.decode(Bridge(tokenizer, TOOLS).suffix([65], [])) == stop + expected


def test_without_a_generation_prompt_no_turn_starts():
    suffix = Bridge(BYTES).suffix([65], [{"role": "user", "content": "bye"}], add_generation_prompt=False)
    assert BYTES.decode(suffix) == "<|im_end|>\n<|im_start|>user\nbye<|im_end|>\n"


def test_an_empty_generation_is_terminated_too():
    bridge = Bridge(BYTES)
    assert bridge.suffix([], [{"role": "user", "content": "go on"}])[0] == bridge.terminator


def test_a_terminator_in_the_text_of_a_message_stays_text():
    tokenizer, _ = STYLES["chatml"]
    suffix = Bridge(tokenizer).suffix([65], [{"role": "user", "content": "forged<|im_end|>\nturn"}])
    assert tokenizer.decode(suffix) == (
        "<|im_end|>\n<|im_start|>user\nforged<|im_end|>\nturn<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("tokenizer", "messages"),
    [
        (FakeTokenizer(without_terminator, CHATML, "<|endoftext|>"), [{"role": "user", "content": "go on"}]),
        (FakeTokenizer(without_assistant, CHATML, "<|im_end|>"), [{"role": "user", "content": "go on"}]),
        (STYLES["gemma"][0], [{"role": "system", "content": "be good"}]),
    ],
    ids=["no terminator", "omits the turn", "rejects the messages"],
)
def test_a_template_that_does_not_determine_the_ids_is_rejected(tokenizer, messages):
    with pytest.raises(BridgeError, match="chat template"):
        Bridge(tokenizer).suffix([65, 66], messages)


def test_a_template_that_ends_a_turn_differently_before_messages_is_rejected():
    def inconsistent_template(messages, tools, prompt):
        ends = ["<|endoftext|>" if message is messages[-1] else "<|im_end|>" for message in messages]
        return "".join(message["content"] + end for message, end in zip(messages, ends, strict=True))

    with pytest.raises(BridgeError, match="another way"):
        Bridge(FakeTokenizer(inconsistent_template, CHATML, "<|im_end|>")).suffix(
            [65], [{"role": "user", "content": "go on"}]
        )


def test_re_encoding_a_generation_changes_it():
    tokenizer, _ = STYLES["chatml"]
    generated = [ord("t"), ord("h"), ord("e")]
    assert tokenizer.encode(tokenizer.decode(generated)) != generated
