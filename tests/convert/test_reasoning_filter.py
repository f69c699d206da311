"""Send only the reasoning of a hosted model back to the hosted model."""

from __future__ import annotations

from gymsdk import responses
from gymsdk.convert.responses import ReasoningFilter
from gymsdk.types import Item

PROMPT = {"role": "user", "content": "go"}
ENCRYPTED = responses.build_reasoning(id="rs_2") | {"encrypted_content": "gAAA"}


def turn(reasoning: Item) -> list[Item]:
    return [
        PROMPT,
        reasoning,
        responses.build_function_call("add", "{}", "c1", id="fc_1"),
        responses.build_function_call_output("c1", "3"),
    ]


def build_input(reasoning_filter: ReasoningFilter, reasoning: Item) -> list[Item]:
    sent: list[Item] = reasoning_filter.build_body({"input": turn(reasoning)})["input"]
    return sent


def test_own_reasoning_is_sent_back_with_the_items_after_it() -> None:
    reasoning_filter, reasoning = ReasoningFilter(), responses.build_reasoning(id="rs_1")
    reasoning_filter.parse_answer({"output": [reasoning]}, {})
    assert build_input(reasoning_filter, reasoning) == turn(reasoning)
    assert build_input(reasoning_filter, ENCRYPTED) == turn(ENCRYPTED)


def test_foreign_reasoning_is_removed_with_the_ids_that_depend_on_it() -> None:
    prompt, call, output = build_input(ReasoningFilter(), responses.build_reasoning("hm"))
    assert (prompt, output) == (PROMPT, responses.build_function_call_output("c1", "3"))
    assert (call["type"], call["call_id"], "id" in call) == ("function_call", "c1", False)


def test_the_turn_after_own_reasoning_keeps_its_ids() -> None:
    reasoning_filter, reasoning = ReasoningFilter(), responses.build_reasoning(id="rs_1")
    reasoning_filter.parse_answer({"output": [reasoning]}, {})
    sent = reasoning_filter.build_body({"input": [*turn(responses.build_reasoning("hm")), *turn(reasoning)]})["input"]
    assert [item.get("id") for item in sent if item.get("type") == "function_call"] == [None, "fc_1"]


def test_reasoning_that_the_provider_does_not_store_is_not_sent_back() -> None:
    reasoning_filter, reasoning = ReasoningFilter(), responses.build_reasoning(id="rs_1")
    reasoning_filter.parse_answer({"output": [reasoning], "store": False}, {})
    reasoning_filter.parse_answer({"output": [reasoning]}, {"store": False})
    assert reasoning not in build_input(reasoning_filter, reasoning)


def test_reasoning_split_from_text_is_dropped() -> None:
    reasoning_filter = ReasoningFilter()
    reasoning, _ = reasoning_filter.parse_answer({"output": [responses.build_message("<think>hm</think>42")]}, {})[
        "output"
    ]
    assert reasoning not in build_input(reasoning_filter, reasoning)


def test_the_oldest_ids_are_dropped_first() -> None:
    reasoning_filter, reasoning_items = (
        ReasoningFilter(max_ids=2),
        [responses.build_reasoning(id=f"rs_{number}") for number in range(3)],
    )
    reasoning_filter.parse_answer({"output": reasoning_items}, {})
    assert [reasoning in build_input(reasoning_filter, reasoning) for reasoning in reasoning_items] == [
        False,
        True,
        True,
    ]
