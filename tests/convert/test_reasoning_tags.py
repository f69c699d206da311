"""Separate reasoning from text."""

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


def test_unclosed_tags_take_linear_time() -> None:
    started = time.process_time()
    found, rest = content.split_think_blocks("<think>a</think>" + "<think>" * 150_000)
    assert (found, rest) == (["a"], "<think>" * 150_000)
    assert time.process_time() - started < 5


@given(st.text(alphabet="ab \n", min_size=1).filter(str.strip), st.text(alphabet="cd <>"))
def test_reasoning_survives_the_round_trip(reasoning: str, text: str) -> None:
    assert content.split_think_blocks(content.prepend_think_block(reasoning.strip(), text)) == (
        [reasoning.strip()],
        text.lstrip(),
    )


@pytest.mark.parametrize(
    ("text", "separated"),
    [("To stop, models write </think>. \\boxed{4}", True), ("\\boxed{4} is final; `</think>` is a tag", False)],
)
def test_a_tag_that_the_text_only_mentions_is_not_a_tag(text: str, *, separated: bool) -> None:
    assert content.split_think_blocks(text, separated=separated) == ([], text)
