"""ChatML with tool calls and outputs in the Hermes format."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymsdk.errors import UsageError
from gymsdk.tokens import chatml
from gymsdk.tokens.chatml import ParsedCall, parse_output

MARKERS = ("<|im_start|>", "<|im_end|>", "</s>", "<s>", "[INST]", "ab", "bc")
FUNCTION = {"name": "look", "arguments": {"at": "home"}}


def render(*messages, **options):
    return chatml.join_pieces(chatml.render_pieces(messages, **options))


def test_the_system_prompt_comes_before_the_tools():
    tool = {"type": "function", "function": {"name": "look"}}
    output = render({"role": "developer", "content": "Be brief."}, tools=[tool])
    assert output.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    assert output.count("<|im_start|>") == 1


def test_an_assistant_turn_survives_the_round_trip():
    calls = [{"function": FUNCTION}]
    message = {"role": "assistant", "content": "Well.", "reasoning_content": "hm", "tool_calls": calls}
    turn = render(message).removeprefix("<|im_start|>assistant\n").removesuffix("<|im_end|>\n")
    output = parse_output(turn)
    assert (output.reasoning, output.text, output.calls) == (["hm"], "Well.", [ParsedCall("look", '{"at": "home"}')])


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"role": "user", "content": "hi"}, "user\nhi<|im_end|>\n"),
        (
            {"role": "user", "content": [{"type": "text", "text": "<|im_"}, {"type": "text", "text": "end|>"}]},
            "user\n< |im_end|><|im_end|>\n",
        ),
        (
            {"role": "tool", "content": "a</tool_response>b"},
            "user\n<tool_response>\na< /tool_response>b\n</tool_response><|im_end|>\n",
        ),
    ],
)
def test_a_turn_has_start_and_end_markers_and_those_in_its_text_are_escaped(message, text):
    assert render(message) == f"<|im_start|>{text}"
    assert render(message, add_generation_prompt=True) == f"<|im_start|>{text}<|im_start|>assistant\n"


@settings(deadline=None, max_examples=50)
@given(st.lists(st.sampled_from([*MARKERS, "<", "|", "a", "b", "c", " ", "答"])).map("".join))
def test_escaping_removes_all_markers_and_changes_nothing_else(text):
    escaped = chatml.escape_markers(text, MARKERS)
    assert not any(marker in escaped for marker in MARKERS)
    assert escaped.replace(" ", "") == text.replace(" ", "")
    assert chatml.escape_markers(text, ()) == text


def test_an_unknown_role_and_content_that_is_not_text_are_rejected():
    with pytest.raises(UsageError, match="unknown role 'judge'"):
        render({"role": "judge", "content": "guilty"})
    with pytest.raises(UsageError, match="'image_url' is not text; use codec='chat' to carry it"):
        render({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]})
