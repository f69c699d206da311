"""Outputs of policies are parsed; broken calls are kept, and no error is raised."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gymsdk.tokens import chatml
from gymsdk.tokens.chatml import ParsedCall, parse_output

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.sampled_from(["</tool_call>", "<think>", "'\"\\"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=4,
)
arguments = st.dictionaries(st.text(), values, max_size=3).map(json.dumps)
parsed_calls = st.lists(st.builds(ParsedCall, st.text(min_size=1), arguments), min_size=1, max_size=3)
FRAGMENTS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "words", "'", '"', "\\", " ", "\n", *"{}[],:"]
FRAGMENTS += ['{"name": "f"', '"arguments": ', "{'name': 'g'}", '{"name": "h", "arguments": {}}']
fragments = st.lists(st.sampled_from(FRAGMENTS)).map("".join)


@settings(deadline=None, max_examples=50)
@given(parsed_calls)
@example([ParsedCall("f", '{"text": "<think>a</think>"}')])
def test_calls_survive_the_round_trip(calls):
    text = "\n".join(chatml.format_tool_call({"name": call.name, "arguments": call.arguments}) for call in calls)
    assert parse_output(text).calls == calls


@settings(deadline=None, max_examples=50)
@given(fragments)
def test_any_text_is_parsed_and_unchanged_without_calls_and_reasoning(text):
    output = parse_output(text)
    assert all(call.name for call in output.calls)
    assert output.calls or output.reasoning or "think>" in text or output.text == text


BROKEN = {
    "truncated": ('<tool_call>\n{"name": "f", "arguments": {"a": "Par', '{"a": "Par'),
    "an extra comma in the arguments": ('<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call>', '{"a": 1,}'),
    "an extra comma at the end": ('<tool_call>{"name": "f", "arguments": {"a": 1},}</tool_call>', '{"a": 1}'),
    "a Python dict": ("<tool_call>{'name': 'f', 'arguments': {'a': \"it's\"}}</tool_call>", "{'a': \"it's\"}"),
    "braces inside a string": ('<tool_call>{"name": "f", "arguments": {"a": "}}{"}}</tool_call>', '{"a": "}}{"}'),
    "an extra brace": ('<tool_call>{"name": "f", "arguments": {}}}</tool_call>', "{}"),
    "a missing brace": ('<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', '{"a": 1}'),
    "no end tag": ('<tool_call>{"name": "f", "arguments": {}}', "{}"),
    "a missing quote": ('<tool_call>{"name": "f", "arguments": {"a": "b}}</tool_call>', '{"a": "b}}'),
    "an array": ('<tool_call>[{"name": "f", "arguments": {"a": 1}}]</tool_call>', '{"a": 1}'),
    "arguments as text": ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', '{"a": 1}'),
    "arguments as a list": ('<tool_call>{"name": "f", "arguments": [1, 2]}</tool_call>', "[1, 2]"),
    "no arguments": ('<tool_call>{"name": "f"}</tool_call>', "{}"),
    "parameters": ('<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', '{"a": 1}'),
    "arguments first": ('<tool_call>{"arguments": {"name": "g"}, "name": "f"}</tool_call>', '{"name": "g"}'),
    "a code fence": ('<tool_call>\n```json\n{"name": "f"}\n```\n</tool_call>', "{}"),
    "a line break in a string": ('<tool_call>{"name": "f", "arguments": {"a": "\n"}}</tool_call>', '{"a": "\n"}'),
    "a number too long": (f'<tool_call>{{"name": "f", "arguments": {"9" * 5000}}}</tool_call>', "9" * 5000),
    "too deeply nested": (f'<tool_call>{{"name": "f", "arguments": {"[" * 9999}}}</tool_call>', "[" * 9999 + "}"),
}


@pytest.mark.parametrize(("text", "arguments"), BROKEN.values(), ids=BROKEN)
def test_an_object_with_a_name_is_a_call_with_verbatim_arguments(text, arguments):
    assert parse_output(text).calls == [ParsedCall("f", arguments)]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>words</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": 7}</tool_call>',
        '<tool_call>{"name": "f',
        "<tool_call>",
        "a </tool_call> alone",
        "  words with blanks around \n",
    ],
)
def test_a_tool_call_block_without_a_name_stays_text(text):
    assert (parse_output(text).text, parse_output(text).calls) == (text, [])


@pytest.mark.parametrize(
    ("generated", "text", "names"),
    [
        ('<tool_call>{"name": "f", "a": {"b}}</tool_call>\n<tool_call>{"name": "g"}</tool_call>', "", ["f", "g"]),
        (
            'First:\n<tool_call>{"name": "f"}\n</tool_call>\nthen <tool_call>{"name": "g"} and after',
            "First:\n\nthen  and after",
            ["f", "g"],
        ),
        ('<tool_call>[{"name": "f"}, {"nome": "g"}]</tool_call>', '{"nome": "g"}', ["f"]),
    ],
)
def test_text_around_calls_is_kept_and_a_malformed_call_does_not_consume_the_next_one(generated, text, names):
    output = parse_output(generated)
    assert (output.text, [call.name for call in output.calls]) == (text, names)


@pytest.mark.parametrize(
    ("generated", "reasoning", "text"),
    [
        ("<think>\nwhy\n</think>\n\nbecause", ["why"], "because"),
        ("why</think>because", ["why"], "because"),
        ("<think>why", ["why"], ""),
        ("<think></think>because", [], "because"),
        ("<think>a</think>b<think>c</think>d", ["a", "c"], "bd"),
        ("the tag <think> opens", [], "the tag <think> opens"),
        ('<think><tool_call>{"name": "f"}</tool_call></think>none', ['<tool_call>{"name": "f"}</tool_call>'], "none"),
    ],
)
def test_reasoning_is_separated_from_the_text(generated, reasoning, text):
    output = parse_output(generated)
    assert (output.reasoning, output.text, output.calls) == (reasoning, text, [])
    # The prompt may start the reasoning.
    assert parse_output('why <tool_call>{"name": "f"}', thinking=True).calls == []


def test_items_have_the_ids_of_their_turn():
    items = parse_output('<think>a</think>b<tool_call>{"name": "f"}</tool_call>').build_items(turn=3)
    kinds = [("reasoning", "rs_3_0"), ("message", "msg_3_1"), ("function_call", "fc_3_2")]
    assert [(item["type"], item["id"]) for item in items] == kinds
    assert items[2]["call_id"] == "call_3_2"
    [item] = parse_output("").build_items(turn=0)
    assert item["content"][0]["text"] == ""


UNITS = ["<tool_call>", "<tool_call>{", '<tool_call>{"', '<tool_call>{"\\"', "<tool_call>['", "<think>", "</think>"]
UNITS += [
    "<think>a</think><think>",
    "</tool_call>",
    '<tool_call>["",',
    '{"name": "f"}',
    "[[",
    '<tool_call>{"name":"f"}',
]


@pytest.mark.slow
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("prefix", ["", '<think>a</think><tool_call>{"'])
def test_parsing_takes_linear_time(unit, prefix):
    started = time.process_time()
    parse_output(prefix + unit * (500_000 // len(unit)))
    # Linear parsing takes a small fraction of this limit. Quadratic parsing takes many times as much.
    assert time.process_time() - started < 10
