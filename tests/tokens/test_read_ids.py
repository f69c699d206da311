"""The texts that a policy read and generated are found in a rendering, or the rendering does not show them."""

from __future__ import annotations

import pytest

from gymsdk.tokens.read_ids import Gap, find_after_turn, find_read, is_own_turn

START, END, USER = 1, 2, 3
PROMPTS = [[START]]
TURN = [20, END]


def say(*text: int) -> list[int]:
    """Return the ids of a user's message and the start of the next turn."""
    return [USER, *text, END, START]


@pytest.mark.parametrize(
    ("parts", "generated", "rendering", "expected"),
    [
        pytest.param([say(10)], TURN, [*say(10), *TURN, *say(11)], say(11), id="the whole rendering"),
        pytest.param(
            [say(10), TURN, say(11)],
            [21, END],
            [*say(10), 90, END, *say(11), 21, END, *say(12)],
            say(12),
            id="earlier turn",
        ),
        pytest.param([say(10)], TURN, [*say(10), 90, END, *say(11)], None, id="another turn"),
        pytest.param([say(10)], TURN, [USER, 10, END, 90, START, 20, END, *say(11)], None, id="another start"),
        pytest.param(
            [say(10), TURN, say(10)],
            TURN,
            [*say(10), *TURN, *say(10), *TURN, *say(11)],
            say(11),
            id="said twice",
        ),
        # The last turn is not there as it was generated, and the first one is.
        pytest.param([say(10), TURN, say(10)], TURN, [*say(10), *TURN, *say(10), 90, END, *say(11)], None, id="first"),
        pytest.param([say(10)], TURN, [*say(10), *TURN, *say(10)], say(10), id="said again"),
        # A new message repeats what the policy read, so the rendering does not show which of them precedes the turn.
        pytest.param([say(10)], TURN, [*say(10), *TURN, USER, 10, END, *say(11)], None, id="said among others"),
        pytest.param(
            [[0, *say(10)], TURN, say(10)],
            TURN,
            [0, *say(10), *TURN, *say(10), 90, END, *say(11)],
            None,
            id="inside",
        ),
        pytest.param([say(10), TURN, []], TURN, [*say(10), *TURN, *say(11)], None, id="unknown last part"),
        pytest.param(
            [say(10), [90, START], [START]], TURN, [*say(10), 90, START, 20, END, *say(11)], None, id="no message"
        ),
    ],
)
def test_what_follows_a_turn_is_found_if_the_rendering_shows_the_turn(
    parts: list[list[int]], generated: list[int], rendering: list[int], expected: list[int] | None
) -> None:
    last = find_read(parts, rendering, PROMPTS)
    assert last is not None
    assert find_after_turn(parts[-1], generated, rendering, last) == expected


def test_a_missing_part_is_noticed() -> None:
    parts = [say(10), TURN, say(11)]
    assert find_read(parts, [*say(11), *TURN, *say(10), 21, END], PROMPTS) is None


def test_a_turn_without_its_reasoning_is_as_long_as_other_messages_up_to_a_copy_of_the_part() -> None:
    rendering = [*say(10), 20, END, *say(11), END, *say(11)]
    second = len(rendering) - len(say(11))
    own = [*[90] * (second - len(say(10)) - 2), 20, END]
    assert rendering[len(say(10)) + len(own) :] == say(11), "the copy is where the turn would end with its reasoning"
    last = find_read([say(10), own, say(11)], rendering, PROMPTS)
    assert last is not None
    assert last.start == len([*say(10), 20, END])


def test_a_part_is_behind_a_message_that_is_too_short_to_be_searched_for() -> None:
    """The end of the first turn, which is written in other ids, and the short message are a copy of what follows the
    second turn, which was cut off and which the template leaves out."""
    cut, short = [90, 91], [USER, 80, START]
    rendering = [*say(10), 20, END, *short, END, *short, 21, END, *say(11)]
    last = find_read([say(10), [92, END], short, cut, [END, *short]], rendering, PROMPTS)
    assert last is not None
    assert last.start == len([*say(10), 20, END, *short])


def test_the_first_part_begins_the_rendering() -> None:
    assert find_read([say(10)], [*say(11), *say(10), 20, END], PROMPTS) is None


def test_a_part_is_not_found_inside_the_part_before() -> None:
    """A template that drops a message, whose text is that of the message before, is noticed."""
    parts = [[0, *say(10)], TURN, say(10)]
    assert find_read(parts, [0, *say(10), *TURN, *say(11)], PROMPTS) is None


@pytest.mark.parametrize(
    ("written", "own", "following", "expected"),
    [
        pytest.param([START, 20, END], [START, 90, 20, END], say(11), True, id="reasoning left out"),
        pytest.param([START, 20, END, USER, 80, END], [START, 20, END], say(11), False, id="another message"),
        pytest.param([START, 20, END, 80], [START, 20, END], say(11), False, id="text after the end"),
        pytest.param([START, 20], [START, 20], [END, *say(11)], True, id="cut off"),
        pytest.param([START, 20, END, USER, 80], [START, 20], [END, *say(11)], False, id="message after a cut turn"),
        pytest.param([START, 20, 7], [START, 20, END], say(11), True, id="another end"),
        pytest.param([], [START, END], say(11), True, id="turn left out"),
    ],
)
def test_a_gap_has_nothing_but_the_turn(
    written: list[int], own: list[int], following: list[int], expected: bool
) -> None:
    assert is_own_turn(Gap(written, own, following), {END}) is expected
