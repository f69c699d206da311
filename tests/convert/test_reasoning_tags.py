"""Reasoning is separated from text."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymsdk.convert import content


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4", ([], "4")),
        ("<think>a</think>4", (["a"], "4")),
        ("<think>\na\n</think>\n\n4", (["a"], "4")),
        ("a\n</think>\n\n4", (["a"], "4")),
        ("<think>a, and then", (["a, and then"], "")),
        ("<think>a</think>4<think>b</think>5", (["a", "b"], "45")),
        ("<think></think>4", ([], "4")),
        ("the tag <think> opens", ([], "the tag <think> opens")),
        (" 4 ", ([], " 4 ")),
    ],
)
def test_reasoning_is_separated_from_the_text(text: str, expected: tuple[list[str], str]) -> None:
    assert content.split_think_blocks(text) == expected


def test_tags_without_end_cost_no_more_than_their_length() -> None:
    started = time.process_time()
    found, rest = content.split_think_blocks("<think>a</think>" + "<think>" * 150_000)
    assert (found, rest) == (["a"], "<think>" * 150_000)
    assert time.process_time() - started < 5


@given(st.text(alphabet="ab \n", min_size=1).filter(str.strip), st.text(alphabet="cd <>"))
def test_thoughts_come_back_from_where_they_were_put(thought: str, text: str) -> None:
    assert content.split_think_blocks(content.prepend_think_block(thought.strip(), text)) == (
        [thought.strip()],
        text.lstrip(),
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [("To stop, models write </think>. \\boxed{4}", True), ("\\boxed{4} is final; `</think>` is a tag", False)],
)
def test_a_tag_that_is_spoken_of_ends_no_thoughts(text: str, *, told: bool) -> None:
    assert content.split_think_blocks(text, separated=told) == ([], text)
