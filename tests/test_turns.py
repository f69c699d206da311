from __future__ import annotations

import pytest

from gymsdk import Message, ToolCall, responses
from gymsdk.responses import NOT_RUN_OUTPUT, iter_played_turns, iter_turn_spans, iter_turns, parse_actions

THOUGHT = responses.build_reasoning("hm")
CALL = responses.build_function_call("go", "{}", "one")
OTHER = responses.build_function_call("stop", "{}", "two")


@pytest.mark.parametrize("odd", [{}, [], {"a": []}, 5, None])
def test_an_invalid_type_or_id_of_a_client_matches_nothing_and_raises_nothing(odd: object):
    items = [CALL, {"type": odd, "name": "x"}, {"type": "function_call_output", "call_id": odd, "output": "1"}]
    assert list(iter_played_turns(items)) == [(slice(0, 1), [])]


def test_a_turn_is_its_calls_or_else_its_text():
    text = [responses.build_message("a"), responses.build_message("b")]
    assert parse_actions([THOUGHT, *text]) == [Message(role="assistant", content="ab")]
    actions = parse_actions([*text, CALL, OTHER])
    assert [action.name for action in actions if isinstance(action, ToolCall)] == ["go", "stop"]
    assert len(actions) == 2
    assert parse_actions([THOUGHT]) == parse_actions([responses.build_message("")]) == []


def test_a_message_of_the_environment_ends_a_turn():
    answer = responses.build_function_call_output("one", "ok")
    user = {"role": "user", "content": "?"}
    first, second, third = [THOUGHT, CALL], [responses.build_message("a")], [responses.build_message("b")]
    assert list(iter_turns([*first, answer, *second, user, *third])) == [first, second, third]
    assert list(iter_turn_spans([*first, answer, *second])) == [slice(0, 2), slice(3, 4)]


def test_a_reply_and_the_calls_with_outputs_were_played():
    answers = [responses.build_function_call_output(*answer) for answer in (("one", "ok"), ("two", NOT_RUN_OUTPUT))]
    ((span, played),) = iter_played_turns([CALL, OTHER, *answers])
    assert (span, played) == (slice(0, 2), [ToolCall(name="go", call_id="one")])
    assert list(iter_played_turns([CALL])) == [(slice(0, 1), [])]
    reply = Message(role="assistant", content="a")
    assert list(iter_played_turns([responses.build_message("a")])) == [(slice(0, 1), [reply])]
    # The ids repeat.
    items = [CALL, answers[0], CALL, answers[1] | {"call_id": "one"}, CALL, answers[0]]
    played = [[action.call_id for action in turn] for _, turn in iter_played_turns(items)]
    assert played == [["one"], [], ["one#3"]]
