"""Outputs of policies are parsed; broken calls are kept, and no error is raised."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymsdk.tokens import chatml
from gymsdk.tokens.parse import ParsedCall, parse_output

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.sampled_from(["</tool_call>", "<think>", "'\"\\"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=4,
)
arguments = st.dictionaries(st.text(), values, max_size=3).map(json.dumps)
calls = st.lists(st.builds(ParsedCall, st.text(min_size=1), arguments), min_size=1, max_size=3)
SCRAPS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "words", "'", '"', "\\", " ", "\n", *"{}[],:"]
SCRAPS += ['{"name": "f"', '"arguments": ', "{'name': 'g'}", '{"name": "h", "arguments": {}}']
scribble = st.lists(st.sampled_from(SCRAPS)).map("".join)


@settings(deadline=None, max_examples=50)
@given(calls)
def test_calls_come_back_as_they_were_written(made):
    written = "\n".join(chatml.format_tool_call({"name": call.name, "arguments": call.arguments}) for call in made)
    assert parse_output(written).calls == made


@settings(deadline=None, max_examples=50)
@given(scribble)
def test_whatever_is_written_is_read(written):
    said = parse_output(written)
    assert all(call.name for call in said.calls)


@settings(deadline=None, max_examples=50)
@given(scribble)
def test_what_makes_no_call_and_no_thought_stays_to_the_letter(written):
    said = parse_output(written)
    assert said.calls or said.reasoning or "think>" in written or said.text == written


BROKEN = {
    "cut short": ('<tool_call>\n{"name": "f", "arguments": {"a": "Par', '{"a": "Par'),
    "a comma too many": ('<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call>', '{"a": 1,}'),
    "a comma at the end": ('<tool_call>{"name": "f", "arguments": {"a": 1},}</tool_call>', '{"a": 1}'),
    "a dict of Python": ("<tool_call>{'name': 'f', 'arguments': {'a': \"it's\"}}</tool_call>", "{'a': \"it's\"}"),
    "braces within": ('<tool_call>{"name": "f", "arguments": {"a": "}}{"}}</tool_call>', '{"a": "}}{"}'),
    "a brace too many": ('<tool_call>{"name": "f", "arguments": {}}}</tool_call>', "{}"),
    "a brace missing": ('<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', '{"a": 1}'),
    "no end": ('<tool_call>{"name": "f", "arguments": {}}', "{}"),
    "a quote missing": ('<tool_call>{"name": "f", "arguments": {"a": "b}}</tool_call>', '{"a": "b}}'),
    "an array": ('<tool_call>[{"name": "f", "arguments": {"a": 1}}]</tool_call>', '{"a": 1}'),
    "text for arguments": ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', '{"a": 1}'),
    "a list for arguments": ('<tool_call>{"name": "f", "arguments": [1, 2]}</tool_call>', "[1, 2]"),
    "no arguments": ('<tool_call>{"name": "f"}</tool_call>', "{}"),
    "parameters": ('<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', '{"a": 1}'),
    "arguments first": ('<tool_call>{"arguments": {"name": "g"}, "name": "f"}</tool_call>', '{"name": "g"}'),
    "fenced": ('<tool_call>\n```json\n{"name": "f"}\n```\n</tool_call>', "{}"),
    "a line break in a string": ('<tool_call>{"name": "f", "arguments": {"a": "\n"}}</tool_call>', '{"a": "\n"}'),
    "a number too long": (f'<tool_call>{{"name": "f", "arguments": {"9" * 5000}}}</tool_call>', "9" * 5000),
    "too deep": (f'<tool_call>{{"name": "f", "arguments": {"[" * 9999}}}</tool_call>', "[" * 9999 + "}"),
}


@pytest.mark.parametrize(("written", "arguments"), BROKEN.values(), ids=BROKEN)
def test_an_object_with_a_name_is_a_call_with_verbatim_arguments(written, arguments):
    assert parse_output(written).calls == [ParsedCall("f", arguments)]


@pytest.mark.parametrize(
    "written",
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
def test_what_has_no_name_stays_text(written):
    assert (parse_output(written).text, parse_output(written).calls) == (written, [])


def test_a_broken_call_does_not_swallow_the_next():
    said = parse_output(
        '<tool_call>{"name": "f", "arguments": {"a": "b}}</tool_call>\n<tool_call>{"name": "g"}</tool_call>'
    )
    assert [call.name for call in said.calls] == ["f", "g"]


def test_text_stands_beside_calls():
    said = parse_output('First:\n<tool_call>{"name": "f"}\n</tool_call>\nthen <tool_call>{"name": "g"} and after')
    assert (said.text, len(said.calls)) == ("First:\n\nthen  and after", 2)


def test_an_object_without_a_name_beside_others_stays_text():
    said = parse_output('<tool_call>[{"name": "f"}, {"nome": "g"}]</tool_call>')
    assert (said.text, said.calls) == ('{"nome": "g"}', [ParsedCall("f", "{}")])


@pytest.mark.parametrize(
    ("written", "thoughts", "text"),
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
def test_thoughts_are_split_off(written, thoughts, text):
    said = parse_output(written)
    assert (said.reasoning, said.text, said.calls) == (thoughts, text, [])


def test_thoughts_the_prompt_has_opened_may_hold_a_call():
    said = parse_output('why <tool_call>{"name": "f"}</tool_call>', thinking=True)
    assert (said.reasoning, said.calls) == (['why <tool_call>{"name": "f"}</tool_call>'], [])


def test_thoughts_in_the_arguments_of_a_call_belong_to_it():
    arguments = '{"text": "<think>a</think>"}'
    assert parse_output(chatml.format_tool_call({"name": "f", "arguments": arguments})).calls == [
        ParsedCall("f", arguments)
    ]


def test_items_have_the_ids_of_their_turn():
    items = parse_output('<think>a</think>b<tool_call>{"name": "f"}</tool_call>').build_items(turn=3)
    assert [(item["type"], item["id"]) for item in items] == [
        ("reasoning", "rs_3_0"),
        ("message", "msg_3_1"),
        ("function_call", "fc_3_2"),
    ]
    assert items[2]["call_id"] == "call_3_2"


def test_nothing_is_an_empty_reply():
    [item] = parse_output("").build_items(turn=0)
    assert item["content"][0]["text"] == ""


SPAM = ["<tool_call>", "<tool_call>{", '<tool_call>{"', '<tool_call>{"\\"', "<tool_call>['", "<think>", "</think>"]
SPAM += ["<think>a</think><think>", "</tool_call>", '<tool_call>["",', '{"name": "f"}', "[[", '<tool_call>{"name":"f"}']


def seconds(written):
    begun = time.process_time()
    parse_output(written)
    return time.process_time() - begun


@pytest.mark.parametrize("unit", SPAM)
@pytest.mark.parametrize("first", ["", '<think>a</think><tool_call>{"'])
def test_parsing_takes_linear_time(unit, first):
    # A straight pass takes a small part of this, a quadratic one many times as much.
    assert seconds(first + unit * (500_000 // len(unit))) < 10
