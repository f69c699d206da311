from __future__ import annotations

import pytest

from gymsdk import Message, ToolCall, wire
from gymsdk.turns import NOT_RUN, actions, played, spans, turns

THOUGHT = wire.reasoning("hm")
CALL = wire.function_call("go", "{}", "one")
OTHER = wire.function_call("stop", "{}", "two")


@pytest.mark.parametrize("odd", [{}, [], {"a": []}, 5, None])
def test_what_a_client_writes_for_a_type_or_an_id_is_nobody_s_and_breaks_nothing(odd: object):
    items = [CALL, {"type": odd, "name": "x"}, {"type": "function_call_output", "call_id": odd, "output": "1"}]
    [span] = spans(items)
    assert (span, played(items, span)) == (slice(0, 1), [])


def test_text_is_one_reply():
    assert actions([THOUGHT, wire.message("a"), wire.message("b")]) == [Message(role="assistant", content="ab")]


def test_the_text_of_a_turn_with_calls_is_no_action():
    acts = actions([wire.message("let me see"), CALL, OTHER])
    assert [act.name for act in acts if isinstance(act, ToolCall)] == ["go", "stop"]
    assert len(acts) == 2


def test_reasoning_alone_or_an_empty_text_is_no_action():
    assert actions([THOUGHT]) == []
    assert actions([wire.message("")]) == []


def test_what_the_environment_says_ends_a_turn():
    answer = wire.function_call_output("one", "ok")
    user = {"role": "user", "content": "?"}
    first, second, third = [THOUGHT, CALL], [wire.message("a")], [wire.message("b")]
    assert list(turns([*first, answer, *second, user, *third])) == [first, second, third]
    assert list(spans([*first, answer, *second])) == [slice(0, 2), slice(3, 4)]


def test_only_calls_that_were_answered_were_played():
    items = [CALL, OTHER, wire.function_call_output("one", "ok"), wire.function_call_output("two", NOT_RUN)]
    assert [act.call_id for act in played(items, slice(0, 2)) if isinstance(act, ToolCall)] == ["one"]


def test_a_call_without_an_answer_was_not_played():
    assert played([CALL], slice(0, 1)) == []


def test_an_answer_counts_for_its_own_turn_even_where_ids_come_again():
    items = [CALL, wire.function_call_output("one", "ok"), CALL, wire.function_call_output("one", NOT_RUN)]
    assert [len(played(items, span)) for span in spans(items)] == [1, 0]


def test_a_reply_was_played():
    assert played([wire.message("a")], slice(0, 1)) == [Message(role="assistant", content="a")]
