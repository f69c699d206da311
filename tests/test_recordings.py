"""Recordings: one conversation has the same marks whoever carried it, and is followed turn by turn."""

from __future__ import annotations

from pathlib import Path

import pytest

from gymsdk import jsonl, responses
from gymsdk.convert import chat
from gymsdk.convert.apis import INBOUND_APIS
from gymsdk.errors import BadRow
from gymsdk.models.recordings import RecordingStore, build_recording, compute_digests, get_input_items, read_recordings
from gymsdk.types import Item

PIXEL = "data:image/png;base64,iVBORw0KGgo="
CALLS = [
    responses.build_function_call("add", {"numbers": [1, 2], "twice": True}, "c1"),
    responses.build_function_call("look", "{}", "c2"),
]
SAID = [responses.build_reasoning("Hm."), responses.build_message("Let me see."), *CALLS]
TOLD = [responses.build_function_call_output("c1", "6"), responses.build_function_call_output("c2", "a pixel")]
OPENING: list[Item] = [
    {"role": "developer", "content": "Be brief."},
    {
        "role": "user",
        "content": [{"type": "input_text", "text": "Look: "}, {"type": "input_image", "image_url": PIXEL}],
    },
    {"role": "user", "content": "What is it?"},
]
REQUEST: Item = {"instructions": "Be right.", "input": [*OPENING, *SAID, *TOLD, responses.build_message("Six.")]}

MESSAGES: Item = {
    "max_tokens": 9,
    "system": [{"type": "text", "text": "Be right.\n"}, {"type": "text", "text": "Be brief."}],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Look: "},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}},
                {"type": "text", "text": "What is it?"},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "t1", "name": "add", "input": {"twice": True, "numbers": [1, 2]}},
                {"type": "tool_use", "id": "t2", "name": "look", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "6"},
                {"type": "tool_result", "tool_use_id": "t2", "content": [{"type": "text", "text": "a pixel"}]},
            ],
        },
        {"role": "assistant", "content": "Six."},
    ],
}
"""The same as Anthropic's clients say it."""

BODIES = {"responses": REQUEST, "chat/completions": chat.build_body(REQUEST), "messages": MESSAGES}


def marked(request: Item) -> list[bytes]:
    return compute_digests(get_input_items(request), request.get("instructions"))


def user(text: str) -> Item:
    return {"role": "user", "content": text}


@pytest.mark.parametrize("path", BODIES)
def test_a_conversation_has_the_same_marks_through_every_face(path: str) -> None:
    found = marked(INBOUND_APIS[path].parse_request(BODIES[path]))
    assert found == marked(REQUEST)
    assert len(set(found)) == 3


@pytest.mark.parametrize(
    "other",
    [
        [*OPENING[:1], user("What is it?")],
        [*OPENING[1:]],
        [*OPENING, user("What is it?")],
        [*OPENING[:2], {"role": "assistant", "content": "What is it?"}],
        [OPENING[0], user("Look: "), user("What is it?")],
    ],
)
def test_another_opening_has_another_mark(other: list[Item]) -> None:
    assert compute_digests(other)[-1] != compute_digests(OPENING)[-1]


@pytest.mark.parametrize(
    "other",
    [
        [CALLS[0], responses.build_function_call_output("c1", "7")],
        [responses.build_function_call("add", {"numbers": [2, 1], "twice": True}, "c1"), TOLD[0]],
        [responses.build_function_call("add", "{torn", "c1"), TOLD[0]],
        [responses.build_function_call("sub", CALLS[0]["arguments"], "c1"), TOLD[0]],
    ],
)
def test_what_calls_said_and_were_told_counts(other: list[Item]) -> None:
    assert compute_digests(other)[-1] != compute_digests([CALLS[0], TOLD[0]])[-1]


def test_of_recordings_that_open_alike_the_one_is_found_that_a_conversation_followed() -> None:
    found, opening = RecordingStore(), compute_digests(OPENING)[-1]
    for number in (1, 2):
        told = [*OPENING, CALLS[1], responses.build_function_call_output("x", str(number))]
        found.add(
            build_recording(
                [opening, compute_digests(told)[-1]], [[CALLS[1]], [responses.build_message(f"It is {number}.")]]
            )
        )
    asked = compute_digests([*OPENING, CALLS[1], responses.build_function_call_output("y", "2")])
    chosen, turn = found.find_next_turn(asked) or pytest.fail("none is found")
    assert (turn, chosen.get_turn(turn)[0]["content"][0]["text"]) == (1, "It is 2.")
    first, turn = found.find_next_turn(compute_digests(OPENING)) or pytest.fail("none is found")
    assert (turn, first) == (0, found.find_by_opening(opening)[0])
    assert found.find_next_turn(compute_digests([user("Hello.")])) is None


def test_a_prompt_that_holds_turns_is_an_opening_as_a_whole(tmp_path: Path) -> None:
    prompt = [user("One?"), responses.build_message("1"), user("Two?")]
    lines = [([user("One?")], "1"), (prompt, "2"), ([*prompt, responses.build_message("Well:")], "2!")]
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(
        b"".join(
            jsonl.dump_row(
                {"responses_create_params": {"input": given}, "response": {"output": [responses.build_message(said)]}}
            )
            for given, said in lines
        )
    )
    found = read_recordings(path)
    for given, said in lines:
        chosen, turn = found.find_next_turn(compute_digests(given)) or pytest.fail("none is found")
        assert chosen.get_turn(turn)[0]["content"][0]["text"] == said


def test_a_file_that_holds_no_rollouts_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(jsonl.dump_row({"responses_create_params": {"input": "One?"}}))
    with pytest.raises(BadRow, match=r"tasks.jsonl:1 is not a line of a rollouts file"):
        read_recordings(path)
