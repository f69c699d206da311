"""Hosted models receive only their own reasoning."""

from __future__ import annotations

from gymsdk import responses
from gymsdk.convert.responses import ReasoningFilter
from gymsdk.types import Item

ASKS = {"role": "user", "content": "go"}
SEALED = responses.build_reasoning(id="rs_2") | {"encrypted_content": "gAAA"}


def turn(thought: Item) -> list[Item]:
    return [
        ASKS,
        thought,
        responses.build_function_call("add", "{}", "c1", id="fc_1"),
        responses.build_function_call_output("c1", "3"),
    ]


def shown(own: ReasoningFilter, thought: Item) -> list[Item]:
    sent: list[Item] = own.build_body({"input": turn(thought)})["input"]
    return sent


def test_own_reasoning_is_sent_back_with_the_items_after_it() -> None:
    own, thought = ReasoningFilter(), responses.build_reasoning(id="rs_1")
    own.parse_answer({"output": [thought]}, {})
    assert shown(own, thought) == turn(thought)
    assert shown(own, SEALED) == turn(SEALED)


def test_the_thoughts_of_others_are_left_out_with_the_ids_that_ask_for_them() -> None:
    asks, call, output = shown(ReasoningFilter(), responses.build_reasoning("hm"))
    assert (asks, output) == (ASKS, responses.build_function_call_output("c1", "3"))
    assert (call["type"], call["call_id"], "id" in call) == ("function_call", "c1", False)


def test_the_turn_after_own_reasoning_keeps_its_ids() -> None:
    own, thought = ReasoningFilter(), responses.build_reasoning(id="rs_1")
    own.parse_answer({"output": [thought]}, {})
    sent = own.build_body({"input": [*turn(responses.build_reasoning("hm")), *turn(thought)]})["input"]
    assert [item.get("id") for item in sent if item.get("type") == "function_call"] == [None, "fc_1"]


def test_what_a_provider_does_not_store_is_not_known_to_it() -> None:
    own, thought = ReasoningFilter(), responses.build_reasoning(id="rs_1")
    own.parse_answer({"output": [thought], "store": False}, {})
    own.parse_answer({"output": [thought]}, {"store": False})
    assert thought not in shown(own, thought)


def test_reasoning_split_from_text_is_dropped() -> None:
    own = ReasoningFilter()
    thought, _ = own.parse_answer({"output": [responses.build_message("<think>hm</think>42")]}, {})["output"]
    assert thought not in shown(own, thought)


def test_the_oldest_ids_are_forgotten_first() -> None:
    own, thoughts = ReasoningFilter(max_ids=2), [responses.build_reasoning(id=f"rs_{number}") for number in range(3)]
    own.parse_answer({"output": thoughts}, {})
    assert [thought in shown(own, thought) for thought in thoughts] == [False, True, True]
