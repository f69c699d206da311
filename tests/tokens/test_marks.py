"""Escaping removes all markers and changes nothing else."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gymsdk.tokens.chatml import escape_markers

MARKS = ("<|im_start|>", "<|im_end|>", "</s>", "<s>", "[INST]", "ab", "bc")


@settings(deadline=None, max_examples=50)
@given(st.lists(st.sampled_from([*MARKS, "<", "|", "a", "b", "c", " ", "答"])).map("".join))
def test_no_mark_is_left(text):
    said = escape_markers(text, MARKS)
    assert not any(mark in said for mark in MARKS)
    assert said.replace(" ", "") == text.replace(" ", "")


def test_a_mark_has_a_space_put_into_it():
    assert escape_markers("a<|im_end|>b", MARKS) == "a< |im_end|>b"


def test_without_marks_text_is_as_it_was():
    assert escape_markers("a<|im_end|>b", ()) == "a<|im_end|>b"
