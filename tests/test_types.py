from __future__ import annotations

import pytest
from pydantic import ValidationError

from gymsdk import Message, Model, Reset, State, Step, Task, ToolCall, Transcript, Verdict, responses
from gymsdk.errors import format_suggestion
from gymsdk.models.scripted import build
from gymsdk.types import extract_text

THOUGHT = responses.build_reasoning("hm")


def said(text):
    return responses.build_message(text)


def test_a_task_opens_with_the_prompt_it_is_asked_with():
    assert Task.ask("Hi").input == [{"role": "user", "content": "Hi"}]


def test_a_prompt_that_is_a_string_is_the_users_message():
    task = Task.model_validate({"responses_create_params": {"input": "Hi"}})
    assert task.input == [{"role": "user", "content": "Hi"}]


def test_undeclared_fields_of_a_row_survive():
    row = {"responses_create_params": {"input": "Hi", "temperature": 0.5}, "id": 7, "more": {"deep": [1]}}
    assert Task.model_validate(row).row() == row


@pytest.mark.parametrize("params", [{}, {"input": None}, {"input": 5}, {"input": ["Hi"]}])
def test_a_row_without_a_readable_prompt_is_refused(params):
    with pytest.raises(ValidationError, match="`input` must be a string or a list of message objects"):
        Task.model_validate({"responses_create_params": params})


@pytest.mark.parametrize("tools", ["search", ["search"], {"name": "search"}])
def test_a_row_whose_tools_are_no_objects_is_refused(tools):
    with pytest.raises(ValidationError, match="`tools` must be a list of tool objects"):
        Task.model_validate({"responses_create_params": {"input": "Hi", "tools": tools}})


def test_arguments_given_as_a_mapping_are_written_as_json():
    assert ToolCall(name="go", arguments={"to": "Zürich"}).arguments == '{"to": "Zürich"}'


def test_arguments_given_as_text_stay_verbatim():
    assert ToolCall(name="go", arguments='{"to" :1}').arguments == '{"to" :1}'


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "[" * 100_000])
def test_arguments_that_are_no_json_object_are_none(text):
    assert ToolCall(name="go", arguments=text).parsed() is None


def test_arguments_are_read_as_a_dict():
    assert ToolCall(name="go", arguments='{"to": 1}').parsed() == {"to": 1}


def test_a_message_joins_the_text_of_its_parts():
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "x"}, {"text": "b"}]
    assert Message(role="user", content=parts).text == "ab"


def test_nothing_has_no_text():
    assert extract_text(None) == ""


def test_what_an_environment_says_is_the_users_unless_a_role_is_given():
    messages = Reset(messages=["a", Message(content="b"), Message(role="system", content="c")]).messages
    assert [message.role for message in messages] == ["user", "user", "system"]


def test_an_opening_may_hold_words_of_the_assistant():
    assert Reset(messages=[Message(role="assistant", content="Hi")]).messages[0].role == "assistant"


def test_a_step_may_not_contain_assistant_messages():
    with pytest.raises(ValidationError, match="role 'assistant' is reserved for the policy"):
        Step(messages=[Message(role="assistant", content="Hi")])


def test_a_state_refuses_fields_it_does_not_declare():
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        State(count=1)


def test_the_reply_is_the_text_of_the_last_turn():
    items = [THOUGHT, said("first"), {"role": "user", "content": "and?"}, THOUGHT, said("the "), said("last")]
    assert Transcript(items=items).reply == "the last"


def test_the_reply_stands_when_the_environment_had_the_last_word():
    assert Transcript(items=[said("4"), {"role": "user", "content": "thanks"}]).reply == "4"


@pytest.mark.parametrize("last", [[], [responses.build_function_call_output("c", "ok")]])
@pytest.mark.parametrize("order", [1, -1])
def test_a_turn_that_called_a_tool_is_no_reply(last, order):
    turn = [said("let me see"), responses.build_function_call("go", "{}", "c")][::order]
    assert Transcript(items=[said("before"), {"role": "user", "content": "?"}, *turn, *last]).reply == ""


def test_nothing_said_is_an_empty_reply():
    assert Transcript().reply == ""
    assert Transcript(items=[THOUGHT]).reply == ""


def test_the_text_is_all_the_policy_wrote_without_its_reasoning():
    items = [THOUGHT, said("a"), {"role": "user", "content": "b"}, said("c")]
    assert Transcript(items=items).text() == "ac"


def test_calls_are_found_by_name_in_their_order():
    items = [responses.build_function_call(name, "{}", name) for name in ("go", "stop", "go")]
    assert [call.call_id for call in Transcript(items=items).calls("go")] == ["go", "go"]
    assert len(Transcript(items=items).calls()) == 3


def test_calls_survive_a_server_that_leaves_fields_out_or_sends_arguments_parsed():
    items = [{"type": "function_call"}, {"type": "function_call", "name": "go", "arguments": {"a": 1}}]
    assert [(call.name, call.arguments) for call in Transcript(items=items).calls()] == [
        ("", "null"),
        ("go", '{"a": 1}'),
    ]


def test_the_output_of_a_call_is_found_by_its_id():
    transcript = Transcript(items=[responses.build_function_call_output("c", [{"type": "input_text", "text": "ok"}])])
    assert transcript.output("c") == "ok"
    assert transcript.output("d") is None


def test_whatever_responds_is_a_model():
    assert isinstance(build("null"), Model)
    assert not isinstance("null", Model)


def test_a_near_name_is_suggested_and_a_far_one_is_not():
    assert format_suggestion("mathh", ["math", "tool_call"]) == "; did you mean 'math'?"
    assert format_suggestion("zzz", ["math", "tool_call"]) == ""
    assert format_suggestion("mathh", ["math"], "its splits: a") == "; did you mean 'math'? Its splits: a"
    assert format_suggestion("zzz", ["math"], "its splits: a") == "; its splits: a"


@pytest.mark.parametrize("name", ["response", "responses_create_params", "agent_ref"])
def test_a_verdict_may_not_have_a_reserved_field(name):
    with pytest.raises(TypeError, match=f"a verdict cannot have a field '{name}'"):
        type("Wrong", (Verdict,), {"__annotations__": {name: "str"}})


@pytest.mark.filterwarnings("ignore:Field name")
def test_a_tasks_field_may_not_hide_a_member_of_task():
    with pytest.raises(TypeError, match="a task cannot have a field 'input'"):

        class Odd(Task):  # the class definition itself raises
            input: str
