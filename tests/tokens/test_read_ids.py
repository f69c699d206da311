"""What a policy read and generated is found in a rendering, or the rendering does not show it."""

from __future__ import annotations

import pytest

from gymsdk.tokens.read_ids import find_after_turn, find_read

START, END, USER = 1, 2, 3
PROMPTS = [[START]]


def say(*text: int) -> list[int]:
    """Return the ids of a user's message and the start of the next turn."""
    return [USER, *text, END, START]


@pytest.mark.parametrize(
    ("read", "generated", "rendering", "expected"),
    [
        pytest.param([say(10)], [20, END], [*say(10), 20, END, *say(11)], say(11), id="the whole rendering"),
        pytest.param(
            [say(10), say(11)], [21, END], [*say(10), 90, END, *say(11), 21, END, *say(12)], say(12), id="earlier turn"
        ),
        pytest.param([say(10)], [20, END], [*say(10), 90, END, *say(11)], None, id="another turn"),
        pytest.param([say(10)], [20, END], [USER, 10, END, 90, START, 20, END, *say(11)], None, id="another start"),
        pytest.param(
            [say(10), say(10)], [20, END], [*say(10), 20, END, *say(10), 20, END, *say(11)], say(11), id="said twice"
        ),
        # The last turn is not there as it was generated, and the first one is.
        pytest.param([say(10), say(10)], [20, END], [*say(10), 20, END, *say(10), 90, END, *say(11)], None, id="first"),
        pytest.param([say(10)], [20, END], [*say(10), 20, END, *say(10)], say(10), id="said again"),
        # A new message repeats what the policy read, so the rendering does not show which of them precedes the turn.
        pytest.param([say(10)], [20, END], [*say(10), 20, END, USER, 10, END, *say(11)], None, id="said among others"),
        pytest.param(
            [[0, *say(10)], say(10)], [20, END], [0, *say(10), 20, END, *say(10), 90, END, *say(11)], None, id="inside"
        ),
        pytest.param([say(10), []], [20, END], [*say(10), 20, END, *say(11)], None, id="unknown last part"),
        pytest.param([say(10), [START]], [20, END], [*say(10), 90, START, 20, END, *say(11)], None, id="no message"),
    ],
)
def test_what_follows_a_turn_is_found_if_the_rendering_shows_the_turn(
    read: list[list[int]], generated: list[int], rendering: list[int], expected: list[int] | None
) -> None:
    last = find_read(read, rendering, PROMPTS)
    assert last is not None
    assert find_after_turn(read[-1], generated, rendering, last) == expected


def test_a_missing_part_is_noticed() -> None:
    assert find_read([say(10), say(11)], [*say(11), 20, END, *say(10), 21, END], PROMPTS) is None
