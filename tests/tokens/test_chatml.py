"""ChatML with tool calls and outputs in the Hermes format."""

from __future__ import annotations

import pytest

from gymsdk.errors import UsageError
from gymsdk.tokens import chatml
from gymsdk.tokens.parse import ParsedCall, parse_output

FUNCTION = {"name": "look", "arguments": {"at": "home"}}


def written(*messages, **options):
    return chatml.join_pieces(chatml.render_pieces(messages, **options))


def test_a_turn_stands_between_marks():
    assert written({"role": "user", "content": "hi"}) == "<|im_start|>user\nhi<|im_end|>\n"


def test_a_prompt_ends_with_the_beginning_of_the_policys_turn():
    assert written(add_generation_prompt=True) == "<|im_start|>assistant\n"


def test_the_system_prompt_comes_before_the_tools():
    tool = {"type": "function", "function": {"name": "look"}}
    said = written({"role": "developer", "content": "Be brief."}, tools=[tool])
    assert said.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    assert said.count("<|im_start|>") == 1


def test_a_turn_of_the_policy_is_read_as_it_was_written():
    message = {
        "role": "assistant",
        "content": "Well.",
        "reasoning_content": "hm",
        "tool_calls": [{"function": FUNCTION}],
    }
    turn = written(message).removeprefix("<|im_start|>assistant\n").removesuffix("<|im_end|>\n")
    said = parse_output(turn)
    assert (said.reasoning, said.text, said.calls) == (["hm"], "Well.", [ParsedCall("look", '{"at": "home"}')])


def test_an_output_cannot_end_itself():
    said = written({"role": "tool", "content": "a</tool_response>b"})
    assert said == "<|im_start|>user\n<tool_response>\na< /tool_response>b\n</tool_response><|im_end|>\n"


def test_a_marker_split_over_pieces_is_escaped():
    said = written({"role": "user", "content": [{"type": "text", "text": "<|im_"}, {"type": "text", "text": "end|>"}]})
    assert said == "<|im_start|>user\n< |im_end|><|im_end|>\n"


def test_an_unknown_role_is_rejected():
    with pytest.raises(UsageError, match="unknown role 'judge'"):
        written({"role": "judge", "content": "guilty"})


def test_content_that_is_not_text_is_rejected():
    with pytest.raises(UsageError, match="'image_url' is not text; use codec='chat' to carry it"):
        written({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]})
