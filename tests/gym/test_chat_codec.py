"""The chat codec: which messages a policy sees and which actions it may return."""

from __future__ import annotations

import math
from typing import Any

import pytest

from gymsdk import UsageError, responses
from gymsdk.gym.codecs import Chat, build_codec
from gymsdk.gym.spaces import Turn

CALL = {"id": "mine", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}


def texts(items: list[dict[str, Any]]) -> list[str]:
    return [part["text"] for item in items for part in item.get("content", [])]


@pytest.mark.parametrize("text", ["42", "", "你好 👩‍💻", "a\0b", "\ud800"])
def test_a_string_action_is_a_verbatim_reply(text: str) -> None:
    assert texts(Chat().parse_action(text, turn=0)) == [text]


def test_a_message_is_split_into_text_and_calls() -> None:
    items = Chat().parse_action({"role": "assistant", "content": "I look.", "tool_calls": [CALL]}, turn=2)
    assert [item["type"] for item in items] == ["message", "function_call"]
    assert items[1] == responses.build_function_call("look", '{"at": 1}', "mine", id="fc_2_1")


def test_parsing_the_same_turn_again_gives_the_same_ids() -> None:
    bare = {"tool_calls": [{"function": {"name": "look", "arguments": {"at": 1}}}, CALL]}
    first, again = (Chat().parse_action(bare, turn=3) for _ in range(2))
    assert first == again
    assert [item["call_id"] for item in first] == ["call_3_0", "mine"]
    assert first[0]["arguments"] == '{"at": 1}'
    assert Chat().parse_action("42", turn=3) == Chat().parse_action("42", turn=3)
    thought = {"role": "assistant", "reasoning_content": "Hm.", "content": "42"}
    assert [item["id"] for item in Chat().parse_action(thought, turn=3)] == ["rs_3_0", "msg_3_1"]
    assert Chat().parse_action([{"type": "reasoning", "summary": []}], turn=3)[0]["id"] == "rs_3_0"


def test_items_keep_their_ids_and_nan_and_are_copied() -> None:
    given = [{"type": "function_call", "name": "look", "arguments": {"at": math.nan}, "call_id": "c", "id": "x"}]
    (item,) = Chat().parse_action(given, turn=0)
    assert item == given[0] | {"arguments": '{"at": NaN}'}
    assert isinstance(given[0]["arguments"], dict)


def test_a_turn_is_parsed_into_an_equal_copy() -> None:
    turn = Turn(responses.build_response([responses.build_message("42")], model="m"))
    parsed = Chat().parse_action(turn, turn=0)
    assert isinstance(parsed, Turn)
    assert parsed == turn
    assert parsed[0] is not turn[0]


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (None, "got NoneType"),
        (7, "got int"),
        (["text"], "got a list with 'text' in it"),
        ({"role": "user", "content": "hi"}, "role 'user'"),
        ({"role": "assistant", "content": 5}, "text or a list of parts"),
        (
            {"role": "assistant", "tool_calls": [{"function": {}}]},
            "each of the `tool_calls` must have a `function` with `name`",
        ),
        ({"role": "assistant", "content": {}}, "text or a list of parts"),
        ({"role": "assistant", "tool_calls": "look"}, "a list of tool calls"),
        ({"role": "assistant", "tool_calls": ["look"]}, "a list of tool calls"),
        (b"", "got bytes"),
        ([{"type": "function_call_output", "call_id": "c", "output": "forged"}], "function_call_output"),
        ([{"role": "system", "content": "forged"}], "'system'"),
        ([{"type": "function_call", "arguments": "{}"}], "`name`"),
        ([{"type": "function_call", "name": "look", "arguments": {"at": {1}}}], "are not JSON"),
        ([{"role": "assistant", "content": 5}], "text or a list of parts"),
    ],
)
def test_an_invalid_action_is_rejected_with_an_explanation(action: Any, message: str) -> None:
    assert action not in Chat().action_space
    with pytest.raises(UsageError, match=message):
        Chat().parse_action(action, turn=0)


def test_an_observation_is_a_list_of_chat_messages_in_the_space() -> None:
    observation = Chat().encode_opening(
        [
            {"role": "developer", "content": "Be brief."},
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "Look:"}, {"type": "input_image", "image_url": "u"}],
            },
        ],
        [],
    )
    assert observation in Chat().observation_space
    assert [message["role"] for message in observation] == ["system", "user"]
    assert observation[1]["content"][1]["type"] == "image_url"


def test_a_reply_holds_tool_outputs_and_messages_as_copies() -> None:
    given = [responses.build_function_call_output("c", "42"), {"type": "message", "role": "user", "content": "Go on."}]
    observation = Chat().encode_reply(given)
    assert observation == [
        {"role": "tool", "tool_call_id": "c", "content": "42"},
        {"role": "user", "content": "Go on."},
    ]
    observation[0]["content"] = "changed"
    assert given[0]["output"] == "42"


@pytest.mark.parametrize(
    ("name", "tokenizer", "message"), [("chats", None, "mean 'chat'"), ("chat", "gpt2", "tokenizer")]
)
def test_an_unknown_codec_or_a_tokenizer_for_chat_is_rejected(name: str, tokenizer: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build_codec(name, tokenizer)
