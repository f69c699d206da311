"""ChatML with tool calls and outputs in the Hermes format."""

from __future__ import annotations

import pytest

from gymsdk.errors import UsageError
from gymsdk.tokens import chatml
from gymsdk.tokens.chatml import ParsedCall, parse_output

FUNCTION = {"name": "look", "arguments": {"at": "home"}}


def render(*messages, **options):
    return chatml.join_pieces(chatml.render_pieces(messages, **options))


def test_a_turn_has_start_and_end_markers():
    assert render({"role": "user", "content": "hi"}) == "<|im_start|>user\nhi<|im_end|>\n"


def test_a_generation_prompt_starts_an_assistant_turn():
    assert render(add_generation_prompt=True) == "<|im_start|>assistant\n"


def test_the_system_prompt_comes_before_the_tools():
    tool = {"type": "function", "function": {"name": "look"}}
    output = render({"role": "developer", "content": "Be brief."}, tools=[tool])
    assert output.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    assert output.count("<|im_start|>") == 1


def test_an_assistant_turn_survives_the_round_trip():
    message = {
        "role": "assistant",
        "content": "Well.",
        "reasoning_content": "hm",
        "tool_calls": [{"function": FUNCTION}],
    }
    turn = render(message).removeprefix("<|im_start|>assistant\n").removesuffix("<|im_end|>\n")
    output = parse_output(turn)
    assert (output.reasoning, output.text, output.calls) == (["hm"], "Well.", [ParsedCall("look", '{"at": "home"}')])


def test_a_tool_output_cannot_contain_its_end_marker():
    output = render({"role": "tool", "content": "a</tool_response>b"})
    assert output == "<|im_start|>user\n<tool_response>\na< /tool_response>b\n</tool_response><|im_end|>\n"


def test_a_marker_split_over_parts_is_escaped():
    output = render({"role": "user", "content": [{"type": "text", "text": "<|im_"}, {"type": "text", "text": "end|>"}]})
    assert output == "<|im_start|>user\n< |im_end|><|im_end|>\n"


def test_an_unknown_role_is_rejected():
    with pytest.raises(UsageError, match="unknown role 'judge'"):
        render({"role": "judge", "content": "guilty"})


def test_content_that_is_not_text_is_rejected():
    with pytest.raises(UsageError, match="'image_url' is not text; use codec='chat' to carry it"):
        render({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]})
