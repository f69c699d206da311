from __future__ import annotations

import pytest
from pydantic import ValidationError

from gymsdk import Message, Reset, State, Step, Task, ToolCall, Transcript, Verdict, responses
from gymsdk.errors import format_suggestion
from gymsdk.types import extract_text

THOUGHT = responses.build_reasoning("hm")


def assistant(text):
    return responses.build_message(text)


USER = {"role": "user", "content": "and?"}


def test_a_task_has_the_prompt_of_ask_or_a_string_as_a_user_message():
    as_string = Task.model_validate({"responses_create_params": {"input": "Hi"}})
    assert Task.ask("Hi").input == as_string.input == [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        *((params, "`input` must be a string or a list of mes") for params in ({}, {"input": 5}, {"input": ["Hi"]})),
        ({"input": "Hi", "tools": "search"}, "`tools` must be a list of tool objects"),
        ({"input": "Hi", "tools": ["search"]}, "`tools` must be a list of tool objects"),
    ],
)
def test_a_row_without_a_readable_prompt_or_tools_is_rejected(params, message):
    with pytest.raises(ValidationError, match=message):
        Task.model_validate({"responses_create_params": params})


def test_arguments_given_as_a_mapping_are_written_as_json_and_text_stays_verbatim():
    assert ToolCall(name="go", arguments={"to": "Zürich"}).arguments == '{"to": "Zürich"}'
    call = ToolCall(name="go", arguments='{"to" :1}')
    assert (call.arguments, call.parsed()) == ('{"to" :1}', {"to": 1})
    assert ToolCall(name="go", arguments='{"to": "\\ud83d\\ude00"}').parsed() == {"to": "\U0001f600"}


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", "null", "[" * 100_000, '{"a": NaN}', '{"a": [1e999]}', '{"a": "\\ud800"}']
)
def test_arguments_that_are_not_a_json_object_are_none(text):
    assert ToolCall(name="go", arguments=text).parsed() is None


def test_a_message_joins_the_text_of_its_parts():
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "x"}, {"text": "b"}]
    assert (Message(role="user", content=parts).text, extract_text(None)) == ("ab", "")


def test_a_step_may_not_contain_assistant_messages():
    with pytest.raises(ValidationError, match="role 'assistant' is reserved for the policy"):
        Step(messages=[Message(role="assistant", content="Hi")])


def test_messages_have_the_user_role_by_default_and_a_state_its_declared_fields_only():
    messages = Reset(messages=["a", Message(content="b"), Message(role="assistant", content="c")]).messages
    assert [message.role for message in messages] == ["user", "user", "assistant"]
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        State(count=1)


@pytest.mark.parametrize(
    ("items", "reply", "text"),
    [
        ([], "", ""),
        ([THOUGHT], "", ""),
        (
            [THOUGHT, assistant("first"), USER, THOUGHT, assistant("the "), assistant("last")],
            "the last",
            "firstthe last",
        ),
        ([assistant("4"), USER], "4", "4"),
    ],
)
def test_the_reply_is_the_text_of_the_last_turn_and_the_text_that_of_all_turns(items, reply, text):
    assert (Transcript(items=items).reply, Transcript(items=items).text()) == (reply, text)


@pytest.mark.parametrize("last", [[], [responses.build_function_call_output("c", "ok")]])
@pytest.mark.parametrize("order", [1, -1])
def test_a_turn_with_a_tool_call_is_not_a_reply(last, order):
    turn = [assistant("let me see"), responses.build_function_call("go", "{}", "c")][::order]
    assert Transcript(items=[assistant("before"), USER, *turn, *last]).reply == ""


def test_calls_are_found_by_name_in_their_order():
    items = [responses.build_function_call(name, "{}", name) for name in ("go", "stop", "go")]
    assert [call.call_id for call in Transcript(items=items).calls("go")] == ["go", "go#2"]
    assert len(Transcript(items=items).calls()) == 3
    odd = [{"type": "function_call"}, {"type": "function_call", "name": "go", "arguments": {"a": 1}}]
    calls = [(call.name, call.arguments) for call in Transcript(items=odd).calls()]
    assert calls == [("", "null"), ("go", '{"a": 1}')]


def test_the_output_of_a_call_is_found_by_its_id():
    transcript = Transcript(items=[responses.build_function_call_output("c", [{"type": "input_text", "text": "ok"}])])
    assert transcript.output("c") == "ok"
    assert transcript.output("d") is None


def test_only_similar_names_are_suggested():
    assert format_suggestion("mathh", ["math", "tool_call"]) == "; did you mean 'math'?"
    assert format_suggestion("zzz", ["math", "tool_call"]) == ""
    assert format_suggestion("mathh", ["math"], "its splits: a") == "; did you mean 'math'? Its splits: a"
    assert format_suggestion("zzz", ["math"], "its splits: a") == "; its splits: a"


@pytest.mark.parametrize("name", ["response", "responses_create_params", "agent_ref"])
def test_a_verdict_may_not_have_a_reserved_field(name):
    with pytest.raises(TypeError, match=f"a verdict cannot have a field '{name}'"):
        type("Wrong", (Verdict,), {"__annotations__": {name: "str"}})


@pytest.mark.filterwarnings("ignore:Field name")
def test_a_task_field_may_not_hide_a_member_of_task():
    with pytest.raises(TypeError, match="a task cannot have a field 'input'"):

        class Odd(Task):  # the class definition itself raises
            input: str
