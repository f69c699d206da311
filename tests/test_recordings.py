"""Recordings: a conversation has the same digests in every API, and is matched turn by turn."""

from __future__ import annotations

from pathlib import Path

import pytest

from gymsdk import jsonl, responses
from gymsdk.convert import chat
from gymsdk.convert.apis import INBOUND_APIS
from gymsdk.errors import BadRow
from gymsdk.models.recordings import compute_digests, read_recordings
from gymsdk.types import Item

PIXEL = "data:image/png;base64,iVBORw0KGgo="
CALLS = [
    responses.build_function_call("add", {"numbers": [1, 2], "twice": True}, "c1"),
    responses.build_function_call("look", "{}", "c2"),
]
SAID = [responses.build_reasoning("Hm."), responses.build_message("Let me see."), *CALLS]
OUTPUTS = [responses.build_function_call_output("c1", "6"), responses.build_function_call_output("c2", "a pixel")]
OPENING: list[Item] = [
    {"role": "developer", "content": "Be brief."},
    {
        "role": "user",
        "content": [{"type": "input_text", "text": "Look: "}, {"type": "input_image", "image_url": PIXEL}],
    },
    {"role": "user", "content": "What is it?"},
]
REQUEST: Item = {"instructions": "Be right.", "input": [*OPENING, *SAID, *OUTPUTS, responses.build_message("Six.")]}

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
"""The same conversation in the format of the Anthropic API."""

BODIES = {"responses": REQUEST, "chat/completions": chat.build_body(REQUEST), "messages": MESSAGES}


def digests_of(request: Item) -> list[bytes]:
    return compute_digests(responses.get_input_items(request), request.get("instructions"))


def user(text: str) -> Item:
    return {"role": "user", "content": text}


@pytest.mark.parametrize("path", BODIES)
def test_a_conversation_has_the_same_digests_in_every_inbound_api(path: str) -> None:
    found = digests_of(INBOUND_APIS[path].parse_request(BODIES[path]))
    assert found == digests_of(REQUEST)
    assert len(set(found)) == 3


@pytest.mark.parametrize(
    "other",
    [
        [*OPENING[:1], user("What is it?")],
        [*OPENING[1:]],
        [*OPENING, user("What is it?")],
        [*OPENING[:2], {"role": "assistant", "content": "What is it?"}],
        [OPENING[0], user("Look: "), user("What is it?")],
        [CALLS[0], responses.build_function_call_output("c1", "7")],
        [responses.build_function_call("add", {"numbers": [2, 1], "twice": True}, "c1"), OUTPUTS[0]],
        [responses.build_function_call("add", "{torn", "c1"), OUTPUTS[0]],
        [responses.build_function_call("sub", CALLS[0]["arguments"], "c1"), OUTPUTS[0]],
    ],
)
def test_another_opening_call_or_output_has_another_digest(other: list[Item]) -> None:
    originals = {compute_digests(items)[-1] for items in (OPENING, [CALLS[0], OUTPUTS[0]])}
    assert compute_digests(other)[-1] not in originals


def test_a_prompt_that_contains_turns_is_one_opening(tmp_path: Path) -> None:
    prompt = [user("One?"), responses.build_message("1"), user("Two?")]
    lines = [([user("One?")], "1"), (prompt, "2"), ([*prompt, responses.build_message("Well:")], "2!")]
    path = tmp_path / "rollouts.jsonl"
    outputs = [{"output": [responses.build_message(reply)]} for _, reply in lines]
    params = [{"input": prompt} for prompt, _ in lines]
    rows = [{"responses_create_params": given, "response": said} for given, said in zip(params, outputs, strict=True)]
    path.write_bytes(b"".join(map(jsonl.dump_row, rows)))
    found = read_recordings(path)
    for prompt, reply in lines:
        chosen, turn = found.find_next_turn(compute_digests(prompt)) or pytest.fail("none is found")
        assert chosen.get_turn(turn)[0]["content"][0]["text"] == reply


def test_a_file_without_rollouts_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(jsonl.dump_row({"responses_create_params": {"input": "One?"}}))
    with pytest.raises(BadRow, match=r"tasks.jsonl:1 is not a line of a rollouts file"):
        read_recordings(path)
