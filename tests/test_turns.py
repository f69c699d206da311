from __future__ import annotations

import pytest

from gymsdk import Message, ToolCall, responses
from gymsdk.responses import NOT_RUN_OUTPUT, get_played_actions, iter_turn_spans, iter_turns, parse_actions

THOUGHT = responses.build_reasoning("hm")
CALL = responses.build_function_call("go", "{}", "one")
OTHER = responses.build_function_call("stop", "{}", "two")


@pytest.mark.parametrize("odd", [{}, [], {"a": []}, 5, None])
def test_an_invalid_type_or_id_of_a_client_matches_nothing_and_raises_nothing(odd: object):
    items = [CALL, {"type": odd, "name": "x"}, {"type": "function_call_output", "call_id": odd, "output": "1"}]
    [span] = iter_turn_spans(items)
    assert (span, get_played_actions(items, span)) == (slice(0, 1), [])


def test_text_is_one_reply():
    assert parse_actions([THOUGHT, responses.build_message("a"), responses.build_message("b")]) == [
        Message(role="assistant", content="ab")
    ]


def test_the_text_of_a_turn_with_calls_is_not_an_action():
    acts = parse_actions([responses.build_message("let me see"), CALL, OTHER])
    assert [act.name for act in acts if isinstance(act, ToolCall)] == ["go", "stop"]
    assert len(acts) == 2


def test_only_reasoning_or_an_empty_text_is_not_an_action():
    assert parse_actions([THOUGHT]) == []
    assert parse_actions([responses.build_message("")]) == []


def test_a_message_of_the_environment_ends_a_turn():
    answer = responses.build_function_call_output("one", "ok")
    user = {"role": "user", "content": "?"}
    first, second, third = [THOUGHT, CALL], [responses.build_message("a")], [responses.build_message("b")]
    assert list(iter_turns([*first, answer, *second, user, *third])) == [first, second, third]
    assert list(iter_turn_spans([*first, answer, *second])) == [slice(0, 2), slice(3, 4)]


def test_only_calls_with_outputs_were_played():
    items = [
        CALL,
        OTHER,
        responses.build_function_call_output("one", "ok"),
        responses.build_function_call_output("two", NOT_RUN_OUTPUT),
    ]
    assert [act.call_id for act in get_played_actions(items, slice(0, 2)) if isinstance(act, ToolCall)] == ["one"]


def test_a_call_without_an_output_was_not_played():
    assert get_played_actions([CALL], slice(0, 1)) == []


def test_an_output_belongs_to_its_turn_even_if_ids_repeat():
    items = [
        CALL,
        responses.build_function_call_output("one", "ok"),
        CALL,
        responses.build_function_call_output("one", NOT_RUN_OUTPUT),
    ]
    assert [len(get_played_actions(items, span)) for span in iter_turn_spans(items)] == [1, 0]


def test_a_reply_was_played():
    assert get_played_actions([responses.build_message("a")], slice(0, 1)) == [Message(role="assistant", content="a")]
