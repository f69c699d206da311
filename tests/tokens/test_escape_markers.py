"""Escaping removes all markers and changes nothing else."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gymsdk.tokens.chatml import escape_markers

MARKERS = ("<|im_start|>", "<|im_end|>", "</s>", "<s>", "[INST]", "ab", "bc")


@settings(deadline=None, max_examples=50)
@given(st.lists(st.sampled_from([*MARKERS, "<", "|", "a", "b", "c", " ", "答"])).map("".join))
def test_no_marker_remains(text):
    escaped = escape_markers(text, MARKERS)
    assert not any(marker in escaped for marker in MARKERS)
    assert escaped.replace(" ", "") == text.replace(" ", "")


def test_a_marker_is_escaped_with_a_space():
    assert escape_markers("a<|im_end|>b", MARKERS) == "a< |im_end|>b"


def test_without_markers_text_is_unchanged():
    assert escape_markers("a<|im_end|>b", ()) == "a<|im_end|>b"
